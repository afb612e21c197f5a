"""ew::attention — causal attention of one whole sequence; the form that capture emits, one node a layer.

    q [T, H, Dk], k [T, Hk, Dk], v [T, Hk, Dv], sinks [H]?, alibi [H]?  ->  [T, H, Dv] of q's dtype

Row t attends rows max(0, t - window + 1) … t (`window` 0: from row 0). H is a multiple of Hk: query head h reads
key/value head h // (H / Hk). Scores are scale · q·k, then softcap · tanh(scores / softcap) unless `softcap` is 0, then
plus alibi[h] · (key position - query position). A sink is one more logit of the softmax, with no value. `layer` counts
the model's attention nodes in order. Row t is position t.
Sources: Vaswani et al. 2017; ALiBi: Press et al. 2022, eq. in §3; softcap: Gemma 2 report 2024, §2; sinks: gpt-oss 2025.
"""

import torch
from torch import Tensor

from .registry import define


def scores(
    q: Tensor,
    k: Tensor,
    alibi: Tensor | None,
    first_position: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Scores [H, T, S] f32 of queries at positions first_position, first_position + 1, … against keys 0 … S-1 of their sequence.

    q [T, H, Dk], k [S, Hk, Dk]. Keys outside a row's view score minus infinity, whatever they hold.
    """
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    found = torch.einsum("thd,shd->hts", q.float(), keys) * scale
    if softcap:
        found = softcap * torch.tanh(found / softcap)
    query_position = torch.arange(q.shape[0], device=q.device)[:, None] + first_position
    distance = torch.arange(k.shape[0], device=q.device)[None, :] - query_position
    if alibi is not None:
        found = found + alibi.float()[:, None, None] * distance
    hidden = distance > 0
    if window:
        hidden = hidden | (distance <= -window)
    return found.masked_fill(hidden, float("-inf"))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi: Tensor | None,
    first_position: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Attention of query rows over the keys and values [S, Hk, …] of their sequence (see `scores`)  ->  [T, H, Dv] f32."""
    logits = scores(q, k, alibi, first_position, scale, window, softcap)
    values = v.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    if sinks is None:
        weights = torch.softmax(logits, dim=-1)
    else:
        column = sinks.float()[:, None, None].expand(-1, q.shape[0], 1)
        weights = torch.softmax(torch.cat((logits, column), dim=-1), dim=-1)[..., :-1]
    return torch.einsum("hts,shd->thd", weights, values).contiguous()


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi: Tensor | None,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    layer: int = 0,
) -> Tensor:
    return attend(q, k, v, sinks, alibi, 0, scale, window, softcap).to(q.dtype)


def shape(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi: Tensor | None,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    layer: int = 0,
) -> Tensor:
    return q.new_empty((*q.shape[:2], v.shape[2]))


attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi, float scale, int window=0, "
    "float softcap=0.0, int layer=0) -> Tensor",
    reference,
    shape,
)
