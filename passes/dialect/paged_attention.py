"""ew::paged_attention — write this step's keys and values into pages, then attend through the page table.

    q [T, H, Dk], k [T, Hk, Dk], v [T, Hk, Dv], sinks [H]?, alibi [H]?
    seq_starts [S+1], context_lens [S], page_tables [G, S, P]   int32
    key_pool [pages, page_size, Hk, Dk], value_pool [pages, page_size, Hk, Dv]   (written in place)
    ->  [T, H, Dv] of q's dtype

Rows seq_starts[s] … seq_starts[s+1]-1 are the newest of sequence s, which holds context_lens[s] tokens once they are
written; so the first of them stands at position context_lens[s] - rows. Position p of sequence s lives in slot
p % page_size of page page_tables[group, s, p // page_size]. A page that no row of the step can see may be -1. Scores
are those of `ew::attention`. `group` is the KV group, `layer` the layer's index in that group. `kv_format` is how the
cache stores keys and values; both are rounded to it as they are written and read back from the pools, so its rounding
is seen in the step that writes them:

    f32, f16, bf16   the values, rounded to nearest even
    int8             scale · code, one f32 scale a token and kv head: scale = max|x| / 127 over the head's features,
                     code = round to nearest even of x · (127 / max|x|); a vector whose max|x| is below 2^-100 is zero

The products are of what is stored. With bf16 and int8 the other factor is bf16 too: queries are rounded, and softmax weights
exp(score - the largest score in its span of 512 positions), times the value's scale with int8. They are divided by the sum
of the weights as rounded (bf16) or as they were, without scales (int8).
Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
"""

import torch
from torch import Tensor

from .attention import attend, scores
from .registry import define

KV_FORMATS = ("f32", "f16", "bf16", "int8")
SPAN = 512  # positions; spans begin at its multiples


def round_kv(x: Tensor, kv_format: str) -> Tensor:
    """x [..., D] as a cache of that format gives it back, in f32."""
    x = x.float()
    if kv_format == "f16":
        return x.half().float()
    if kv_format == "bf16":
        return x.bfloat16().float()
    if kv_format == "int8":
        limit = x.abs().amax(-1, keepdim=True)
        zero = limit < 2.0**-100
        codes = torch.round(x * (127 / limit).masked_fill(zero, 0))
        return codes * (limit / 127).masked_fill(zero, 0)
    if kv_format == "f32":
        return x
    raise ValueError(f"unknown cache format '{kv_format}'; known: {', '.join(KV_FORMATS)}")


def _weigh(logits: Tensor, v: Tensor, sinks: Tensor | None, span_of: Tensor, kv_format: str) -> Tensor:
    """Values v [S, Hk, Dv] weighed by the softmax of logits [H, T, S] in bf16 products  ->  [T, H, Dv] f32; span_of [S]."""
    values = v.repeat_interleave(logits.shape[0] // v.shape[1], dim=1)
    largest = logits.amax(-1, keepdim=True)
    if sinks is not None:
        largest = torch.maximum(largest, sinks.float()[:, None, None])
    total = torch.zeros_like(largest) if sinks is None else torch.exp(sinks.float()[:, None, None] - largest)
    out = torch.zeros(*logits.shape[:2], v.shape[2])
    for span in span_of.unique():
        part, held = logits[..., span_of == span], values[span_of == span].transpose(0, 1)
        top = part.amax(-1, keepdim=True).clamp(
            min=torch.finfo(torch.float32).min
        )  # a query may see none of the span
        weights = torch.exp(part - top)
        join = torch.exp(top - largest)
        if kv_format == "int8":
            total = total + join * weights.sum(-1, keepdim=True)
            value_scale = held.abs().amax(-1)[:, None, :] / 127
            rounded = (weights * value_scale).bfloat16().float()
            codes = held / torch.where(value_scale > 0, value_scale, 1.0).transpose(1, 2)
            out = out + join * (rounded @ codes.round())
        else:
            rounded = weights.bfloat16().float()
            total = total + join * rounded.sum(-1, keepdim=True)
            out = out + join * (rounded @ held)
    return (out / total).transpose(0, 1).contiguous()


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi: Tensor | None,
    seq_starts: Tensor,
    context_lens: Tensor,
    page_tables: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    group: int = 0,
    layer: int = 0,
    kv_format: str = "f32",
) -> Tensor:
    page_size = key_pool.shape[1]
    out = q.new_zeros((*q.shape[:2], v.shape[2]))
    for s, context in enumerate(context_lens.tolist()):
        start, end = seq_starts[s].item(), seq_starts[s + 1].item()
        if end == start:
            continue
        first = context - (end - start)
        pages = page_tables[group, s].long()
        written = torch.arange(first, context, device=q.device)
        slots = (pages[written // page_size], written % page_size)
        key_pool[slots] = round_kv(k[start:end], kv_format).to(key_pool.dtype)
        value_pool[slots] = round_kv(v[start:end], kv_format).to(value_pool.dtype)
        oldest = max(0, first - window + 1) if window else 0
        seen = torch.arange(oldest, context, device=q.device)
        keys, values = (pool[pages[seen // page_size], seen % page_size] for pool in (key_pool, value_pool))
        query = q[start:end]
        if kv_format in ("f32", "f16"):
            rows = attend(query, keys, values, sinks, alibi, first - oldest, scale, window, softcap)
        else:
            logits = scores(query.bfloat16(), keys, alibi, first - oldest, scale, window, softcap)
            rows = _weigh(logits, values, sinks, seen // SPAN, kv_format)
        out[start:end] = rows.to(q.dtype)
    return out


def shape(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi: Tensor | None,
    seq_starts: Tensor,
    context_lens: Tensor,
    page_tables: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    group: int = 0,
    layer: int = 0,
    kv_format: str = "f32",
) -> Tensor:
    return q.new_empty((*q.shape[:2], v.shape[2]))


paged_attention = define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi, Tensor seq_starts, "
    "Tensor context_lens, Tensor page_tables, Tensor(a!) key_pool, Tensor(b!) value_pool, float scale, "
    "int window=0, float softcap=0.0, int group=0, int layer=0, str kv_format='f32') -> Tensor",
    reference,
    shape,
)
