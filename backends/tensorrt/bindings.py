"""The inputs and outputs of a TensorRT network: names, shapes, types, and the shapes its two optimisation profiles allow.

A step is T packed tokens of S sequences, of which R rows' logits are wanted; Q is the largest number of rows that one sequence
has. KV group g has a pool of Ng pages. The network has these inputs, all int32 but the pools:

    tokens, positions [T]    as in StepInput
    logit_rows [R]           as in StepInput; a step that wants none asks for row 0, and the executor drops it
    query_rows [S, Q]        the packed row of each query. A sequence's rows stand at the END of its Q places, the places before
                             them repeat packed row 0
    row_places [T]           s * Q + i: where packed row t stands in query_rows, so that results are gathered back
    context_lens [S]         keys visible: the cached ones and the step's
    page_table_g [S, P]      the page of positions from p * page_size. -1, pages that lie past the context and pages behind the
                             window of all of the sequence's rows have become the zero page
    page_order_g [T]         packed rows in the order of the pages that they are written to
    page_starts_g [Ng + 1]   rows page_starts_g[p] .. page_starts_g[p + 1] - 1 of page_order_g go to page p
    page_first_g [Ng]        the slot of the first of them; 0 in pages that nothing is written to
    key_pool_g_l, value_pool_g_l [Ng, kv heads, page_size, head dim]   of layer l in group g; an output `<name>_out` aliases it

    logits [R, vocabulary]   output, float32

The **zero page** is the last of a pool, one more than the runtime has asked for. It starts as zeros; only the padding of a step
(metadata.py, `sequences`) is written there, which may be NaN. It is read only where a mask hides it, and what is read becomes
zeros.

## What a lowering may rely on (read from NVIDIA's documentation)

Query place i of sequence s stands at position q = context_lens[s] - Q + i, and may see key j where j <= q, and j > q - window in
a windowed layer. Places before a sequence's first row have q < context_lens[s] - rows, which may be negative: clamp it to 0, so
that no row of a softmax is empty. Their results are gathered by nobody.

**CausalMaskKind.LOWER_RIGHT with key_value_lengths says too little.** "Diagonal anchored at bottom-right corner
(j <= i + (s_kv - s_q))" (Python API, CausalMaskKind), where key is "[b, d_kv, s_kv, h]" (operators/Attention.html): s_kv is the
padded length, and a chunk would see keys past its own. Nothing says that the lengths move the diagonal. For Q = 1 both
readings agree; for more they agree only where every length is the padded one. Moreover TensorRT 11's fused kernels have been
seen to look past key_value_lengths in bf16, and to refuse them in f16 (github.com/NVIDIA/TensorRT-Model-Connect, pull requests
1035 and 1048, which went over to a mask). So: **CausalMaskKind.NONE with a boolean mask [S, 1, Q, P * page_size]**, whose meaning
is stated ("a True value indicates that the corresponding position is allowed to attend"), made in the network from
context_lens once a KV group and shared by its layers. The interpreter refuses LOWER_RIGHT with lengths where the readings differ.

A hidden key is not a harmless one: softmax gives it the weight 0, and 0 * NaN is NaN. The slots past a sequence's context in its
last page were never written, and may hold anything. So what is gathered passes a select that puts zeros in
place of keys and values with j >= context_lens[s], and of those in the zero page, before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "PROFILES",
    "Binding",
    "Limits",
    "inputs",
    "outputs",
    "pool_names",
    "profile",
    "sizes",
    "step_inputs",
]

PROFILES = ("decode", "chunk")
"""Names of the optimisation profiles, in the order in which they are added: one row a sequence; any rows."""


class _Layer(Protocol):
    @property
    def kv_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def format(self) -> str: ...


class _Group(Protocol):
    @property
    def layers(self) -> Sequence[_Layer]: ...


@dataclass(frozen=True, slots=True)
class Binding:
    """An input or output. `shape`: numbers, and names of sizes (T, S, Q, R, P, N0, N0+1, …). `type`: int32, f16, bf16 or f32."""

    name: str
    shape: tuple[str | int, ...]
    type: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step that a plan takes.

    sequences, tokens: of one step. context: positions of a sequence. page_size: tokens of a page. pages[g]: of group g's
    pool, the zero page among them.
    """

    sequences: int
    tokens: int
    context: int
    page_size: int
    pages: tuple[int, ...]

    @property
    def width(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.context // self.page_size)


def step_inputs(groups: int) -> list[Binding]:
    """The int32 inputs of a step, in the order in which they lie in its block (metadata.py)."""
    shapes: list[tuple[str, tuple[str, ...]]] = [
        ("tokens", ("T",)),
        ("positions", ("T",)),
        ("logit_rows", ("R",)),
        ("query_rows", ("S", "Q")),
        ("row_places", ("T",)),
        ("context_lens", ("S",)),
    ]
    for g in range(groups):
        shapes += [
            (f"page_table_{g}", ("S", "P")),
            (f"page_order_{g}", ("T",)),
            (f"page_starts_{g}", (f"N{g}+1",)),
            (f"page_first_{g}", (f"N{g}",)),
        ]
    return [Binding(name, shape, "int32") for name, shape in shapes]


def pool_names(group: int, layer: int) -> tuple[str, str]:
    """The inputs that hold the keys and the values of a group's layer."""
    return f"key_pool_{group}_{layer}", f"value_pool_{group}_{layer}"


def _pools(groups: Sequence[_Group], page_size: int) -> list[Binding]:
    found = []
    for g, group in enumerate(groups):
        for i, layer in enumerate(group.layers):
            for name, width in zip(pool_names(g, i), (layer.key_dim, layer.value_dim), strict=True):
                found.append(Binding(name, (f"N{g}", layer.kv_heads, page_size, width), layer.format))
    return found


def inputs(groups: Sequence[_Group], page_size: int) -> list[Binding]:
    """All inputs: the step's, then the pools. `groups` are those of the model's facts."""
    return [*step_inputs(len(groups)), *_pools(groups, page_size)]


def outputs(groups: Sequence[_Group], page_size: int, vocab_size: int) -> list[Binding]:
    """The logits, then every pool as `<name>_out`, which aliases the input."""
    pools = [Binding(f"{pool.name}_out", pool.shape, pool.type) for pool in _pools(groups, page_size)]
    return [Binding("logits", ("R", vocab_size), "f32"), *pools]


def sizes(kind: str, limits: Limits) -> dict[str, tuple[int, int, int]]:
    """Least, usual and largest value of every size in the profile `kind`.

    Decode has one row a sequence. A chunk may be any step, one of decodes alone too, so whatever fits no decode fits there.
    """
    most, tokens = limits.sequences, limits.tokens
    width = (1, min(limits.width, -(-1024 // limits.page_size)), limits.width)
    if kind == "decode":
        rows = min(most, tokens)
        few = (1, min(rows, 16), rows)
        found = {"T": few, "S": few, "Q": (1, 1, 1), "R": few, "P": width}
    elif kind == "chunk":
        many = (1, min(tokens, 256), tokens)
        found = {
            "T": many,
            "S": (1, min(most, 4), most),
            "Q": many,
            "R": (1, min(tokens, 4), tokens),
            "P": width,
        }
    else:
        raise ValueError(f"unknown profile '{kind}'; known: {', '.join(PROFILES)}")
    for g, pages in enumerate(limits.pages):
        found[f"N{g}"] = (2, pages, pages)
    return found


def profile(
    kind: str, bindings: Sequence[Binding], limits: Limits
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Least, usual and largest shape of every binding in the profile `kind`: what `IOptimizationProfile.set_shape` takes."""
    known = sizes(kind, limits)
    shapes = {}
    for binding in bindings:
        low, usual, high = (_resolve(binding.shape, known, which) for which in range(3))
        shapes[binding.name] = (low, usual, high)
    return shapes


def _resolve(
    shape: tuple[str | int, ...], known: Mapping[str, tuple[int, int, int]], which: int
) -> tuple[int, ...]:
    found = []
    for part in shape:
        if isinstance(part, int):
            found.append(part)
        else:
            name, _, more = part.partition("+")
            found.append(known[name][which] + int(more or 0))
    return tuple(found)
