"""What torch.export meets in place of attention, masks and experts.

Rules:
1. A mask is never built. Its index function is evaluated at chosen rows for the engine's whole context, and
   the answer must be causal, whole or windowed; the marker `Seen` carries it to the attention. Chunked,
   bidirectional and other shapes are refused.
2. An attention call that goes through transformers' attention interface becomes one `ew.attention` node. An
   argument that would change its result and that the op cannot express is refused.
3. An experts call that goes through the experts interface becomes one `ew.moe` node. Its gating function is recognised
   by evaluating it, not by its name; interleaved or transposed weights are put into the op's layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from enginewright.passes.dialect.activation import ACTIVATIONS
from enginewright.passes.dialect.moe import gate_and_up
from enginewright.recipes.errors import CaptureError

__all__ = ["NAME", "OWN_LENGTH", "Seen", "classify_mask", "hooked"]

#: The name under which the hooks are registered in transformers' interfaces.
NAME = "enginewright"

#: Tokens at which the masks and biases of a model's own attention are evaluated.
OWN_LENGTH = 300
OWN_WINDOW = OWN_LENGTH - 2

#: Keyword arguments of attention functions that do not change the result of one whole causal sequence without dropout.
_HARMLESS = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions",
    "output_hidden_states", "layer_idx", "past_key_values", "cache", "deterministic", "training",
    "query_length", "logits_to_keep", "return_dict", "target_dtype", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", "num_items_in_batch", "output_router_logits",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a row sees under a mask: the last `window` positions, itself included; 0 is all of them.

    `fault` says why a mask cannot be expressed so; it is raised by the attention that uses it, as models also make
    masks that no layer uses.
    """

    window: int
    fault: CaptureError | None = None


def classify_mask(sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], context: int) -> Seen:
    """Find the window of a mask given as `sees(rows[R, 1], columns[1, context]) -> bool`, or raise CaptureError.

    The window is read off the last row; then rows near every edge that a window or a chunk could have are compared whole.
    """
    columns = torch.arange(context)[None]
    last = sees(torch.tensor([[context - 1]]), columns).expand(1, context)[0]
    window = int(last.sum())
    edges = {0, 1, 2, 3, 5, 8, 13, 21, 34, 55, context // 2, context - 2, context - 1}
    edges |= {window * k + d for k in (1, 2, 3) for d in (-2, -1, 0, 1, 2)}
    rows = torch.tensor(sorted(r for r in edges if 0 <= r < context))[:, None]
    found = sees(rows, columns).expand(len(rows), context)
    expected = (columns <= rows) & (columns > rows - window)
    if window == 0 or not torch.equal(found, expected):
        wrong = (found != expected).any(1).nonzero()
        row = int(rows[int(wrong[0])]) if len(wrong) else context - 1
        seen = found[int(wrong[0])].nonzero().flatten().tolist() if len(wrong) else []
        raise CaptureError(
            "an attention mask is neither causal nor a sliding window, so its keys cannot be paged by window",
            found=f"position {row} sees {_ranges(seen)}",
            expected=f"position {row} sees {_ranges(list(range(max(0, row - window + 1), row + 1)))}",
            action="models with chunked, bidirectional or block masks are not supported",
        )
    return Seen(0 if window >= context else window)


def _ranges(positions: list[int]) -> str:
    """Sorted positions as short text: `0..7, 12`."""
    runs: list[list[int]] = []
    for p in positions:
        if runs and p == runs[-1][1] + 1:
            runs[-1][1] = p
        else:
            runs.append([p, p])
    text = ", ".join(f"{a}..{b}" if a != b else str(a) for a, b in runs[:4])
    return (text or "nothing") + (", …" if len(runs) > 4 else "")


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """Compute on real tensors although a trace is under way."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.device("cpu"), torch.no_grad():
        yield


def _path(module: torch.nn.Module) -> str:
    return getattr(module, "_enginewright_path", type(module).__name__)


class _Hooks:
    """The functions to register, for one capture with a stated context length in tokens."""

    def __init__(self, context: int):
        self.context = context
        self.layers = 0

    def mask(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Seen:
        if attention_mask is not None:
            return Seen(
                0, CaptureError("the model makes a mask of its own besides transformers' mask functions")
            )
        return self.seen(*args, **kwargs)

    def seen(self, *args: Any, mask_function: Callable[..., Any] | None = None, **kwargs: Any) -> Seen:
        """Rule 1 for an index function `mask_function(batch, head, row, column) -> bool`."""
        zero = torch.tensor(0)

        def sees(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(mask_function(zero, zero, rows, columns))  # type: ignore[misc]

        try:
            with _eagerly():
                return classify_mask(sees, self.context)
        except CaptureError as error:
            return Seen(0, error)

    def own_mask(self, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The mask itself, for a model with its own attention; a window must be short enough to show when evaluated."""
        seen = self.seen(*args, **kwargs)
        if seen.window > OWN_WINDOW:
            raise CaptureError(
                "a model with its own attention has a window too long to verify", found=seen.window
            )
        return build(*args, **kwargs)

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, H, T, Dk], key [1, Hk, T, Dk], value [1, Hk, T, Dv] -> [1, T, H, Dv]."""
        unknown = [k for k, v in kwargs.items() if v is not None and v is not False and k not in _HARMLESS]
        if unknown:
            raise CaptureError(
                f"attention in {_path(module)} takes arguments that are not understood",
                found=", ".join(f"{k}={_brief(kwargs[k])}" for k in unknown),
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if isinstance(attention_mask, Seen):
            if attention_mask.fault is not None:
                raise attention_mask.fault
            window = attention_mask.window
        elif attention_mask is None and causal:
            window = sliding_window if sliding_window and sliding_window < self.context else 0
        else:
            raise CaptureError(
                f"attention in {_path(module)} is not causal, or its mask is not made by transformers",
                found=_brief(attention_mask) if attention_mask is not None else "no mask and is_causal=False",
            )
        out = torch.ops.ew.attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            s_aux,
            None,
            float(query.shape[-1] ** -0.5 if scaling is None else scaling),
            int(window),
            float(softcap or 0.0),
            self.layers,
        )
        self.layers += 1
        return out.unsqueeze(0), None

    def experts(
        self, module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k] -> [T, H]."""
        if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
            raise CaptureError(
                f"the experts in {_path(module)} are not plain gated MLPs", found=type(module).__name__
            )
        with _eagerly():
            activation, alpha, limit, interleaved = recognise_gate(module)
        gate_up, down = module.gate_up_proj, module.down_proj
        if getattr(module, "is_transposed", False):
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        gate_up_bias = module.gate_up_proj_bias if module.has_bias else None
        down_bias = module.down_proj_bias if module.has_bias else None
        if interleaved:
            gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
            if gate_up_bias is not None:
                gate_up_bias = torch.cat((gate_up_bias[:, ::2], gate_up_bias[:, 1::2]), 1)
        return torch.ops.ew.moe(
            hidden_states,
            top_k_index,
            top_k_weights,
            gate_up,
            gate_up_bias,
            down,
            down_bias,
            activation,
            alpha,
            limit,
        )


def recognise_gate(module: Any) -> tuple[str, float, float, bool]:
    """The middle of an experts module as (activation, alpha, limit, interleaved), found by evaluating `_apply_gate`."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(64, 32, generator=generator) * 6
    got = module._apply_gate(sample)
    alpha, limit = float(getattr(module, "alpha", 1.0)), float(getattr(module, "limit", 0.0) or 0.0)
    candidates = [(name, 1.0, 0.0) for name in ACTIVATIONS] + [("swiglu_oai", alpha, limit)]
    for interleaved in (False, True):
        ordered = torch.cat((sample[:, ::2], sample[:, 1::2]), 1) if interleaved else sample
        for candidate in candidates:
            expected = gate_and_up(ordered, *candidate)
            if got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5, atol=1e-6):
                return (*candidate, interleaved)
    raise CaptureError(
        f"the experts in {_path(module)} gate their hidden values in a way that is not known",
        found=f"{type(module).__name__}, activation {_brief(getattr(module, 'act_fn', None))}",
        expected=f"one of {', '.join(ACTIVATIONS)}, swiglu_oai",
    )


def _brief(value: Any) -> str:
    return (
        f"{type(value).__name__}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]
    )


@contextlib.contextmanager
def hooked(model: Any, context: int) -> Iterator[None]:
    """Within, `model` sends its masks, attention and experts to the hooks; `context` is the engine's limit in tokens."""
    from transformers import masking_utils
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    hooks = _Hooks(context)
    ALL_ATTENTION_FUNCTIONS.register(NAME, hooks.attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, hooks.mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, hooks.experts)
    # Positions that restart would be taken for packed sequences; here they are one sequence.
    packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    own_masks = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("eager", "sdpa")}
    for name, build in own_masks.items():
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, functools.partial(hooks.own_mask, build))
    for path, module in model.named_modules():
        module._enginewright_path = path
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = packed
        for name, build in own_masks.items():
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, build)
        for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS):
            interface._global_mapping.pop(NAME, None)
