"""insert_paged_kv — attention over one sequence becomes attention over pages of many.

Rules
1. ew::attention(q, k, v, sinks, alibi, scale, window, softcap)  →  ew::paged_attention with the same attributes, which
   also reads `seq_starts`, `context_lens`, `page_tables` and its layer's two pools, `key_pool_<group>_<layer>` and
   `value_pool_<group>_<layer>`. All are new inputs of the graph.
2. Layers with the same window form one KV group and share a page table; groups are numbered by their first layer, and
   `facts.kv_groups` says what each layer stores a token.
3. A page holds `page_size` tokens; with 0, as many as the maximum context: one page a sequence.
4. A layer's keys and values are stored in `layer_formats[i]` where that names layer i of the model (the attention's
   `layer`), else in `kv_format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from enginewright.passes.dialect import OPS
from enginewright.passes.inputs import add_input, symbol
from enginewright.passes.manager import PassResult
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import KvGroup, KvLayer, Program


class InsertPagedKv:
    name = "insert_paged_kv"

    def __init__(
        self,
        page_size: int = 16,
        kv_format: str = "f32",
        layer_formats: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.options: Mapping[str, Any] = {
            "page_size": page_size,
            "kv_format": kv_format,
            "layer_formats": layer_formats,  # looked up when the pass runs: another pass may fill it
        }

    def run(self, program: Program) -> PassResult:
        attentions = [node for node in program.graph.nodes if is_call(node, OPS["attention"])]
        windows = list(dict.fromkeys(argument(node, "window") for node in attentions))
        program.facts.kv_groups = groups = [KvGroup(window) for window in windows]
        if not attentions:
            return PassResult(0)
        sequences, pages = symbol(program, 3), symbol(program, 5)
        metadata = (
            add_input(program, "seq_starts", [symbol(program, 4)], torch.int32),
            add_input(program, "context_lens", [sequences], torch.int32),
            add_input(program, "page_tables", [len(groups), sequences, symbol(program, 7)], torch.int32),
        )
        for node in attentions:
            group = windows.index(argument(node, "window"))
            layer = len(groups[group].layers)
            formats: Mapping[int, str] = self.options["layer_formats"]
            stored = _stored(node, formats.get(argument(node, "layer"), self.options["kv_format"]))
            groups[group].layers.append(stored)
            page = [pages, self.options["page_size"] or program.facts.max_context, stored.kv_heads]
            pools = [
                add_input(program, f"{kind}_pool_{group}_{layer}", [*page, width], torch.float32)
                for kind, width in (("key", stored.key_dim), ("value", stored.value_dim))
            ]
            names = ("q", "k", "v", "sinks", "alibi")
            attributes = tuple(argument(node, name) for name in ("scale", "window", "softcap"))
            args = (
                *(argument(node, name) for name in names),
                *metadata,
                *pools,
                *attributes,
                group,
                layer,
                stored.format,
            )
            module = node.meta.get("module")
            new = program.call(OPS["paged_attention"], args, before=node, module=module)
            node.replace_all_uses_with(new)
        return PassResult(len(attentions))


def _stored(node: fx.Node, kv_format: str) -> KvLayer:
    keys, values = argument(node, "k").meta["val"], argument(node, "v").meta["val"]
    return KvLayer(keys.shape[1], keys.shape[2], values.shape[2], node.meta.get("module", ""), kv_format)
