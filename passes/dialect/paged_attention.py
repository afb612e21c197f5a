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

    f32, bf16   the values, rounded to nearest even
    int8        scale · code, one f32 scale a token and kv head: scale = max|x| / 127 over the head's features,
                code = round to nearest even of x · (127 / max|x|); a vector whose max|x| is below 2^-100 is zero
Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
"""

import torch
from torch import Tensor

from .attention import attend
from .registry import define

KV_FORMATS = ("f32", "bf16", "int8")


def round_kv(x: Tensor, kv_format: str) -> Tensor:
    """x [..., D] as a cache of that format gives it back, in f32."""
    x = x.float()
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
        rows = attend(q[start:end], keys, values, sinks, alibi, first - oldest, scale, window, softcap)
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
