"""Rules of the layers that transformers have: rotary embedding, cache update, attention.

`guide:NAME` is docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/NAME.html.
"""

from __future__ import annotations

import numpy as np

from .rules import Call, InterpreterError, rule
from .values import Array, rounded

__all__: list[str] = []


@rule("ROTARY_EMBEDDING", "IRotaryEmbeddingLayer")
def rotary_embedding(call: Call) -> list[Array]:
    """guide:transformers-rope. Input [B, N, S, H], its first `rotary_embedding_dim` features (0: all) turned in pairs.

    Pairs are neighbours if `interleaved`, else i and i + half. With position ids [B, S] the tables are [positions, half], else
    [B, S, half]. (a, b) becomes (a cos - b sin, a sin + b cos), as ONNX RotaryEmbedding-23 has it.
    """
    x, cosines, sines, positions = call[0], call[1], call[2], call.given(3)
    if x.ndim != 4:
        raise InterpreterError(f"input of shape {x.shape}, not [B, N, S, H]")
    width = call.layer.rotary_embedding_dim or x.shape[3]
    if positions is not None:
        if positions.min() < 0 or positions.max() >= len(cosines):
            raise InterpreterError(f"positions to {positions.max()} of {len(cosines)}")
        cosines, sines = cosines[positions], sines[positions]
    if cosines.shape != (x.shape[0], x.shape[2], width // 2) or sines.shape != cosines.shape:
        raise InterpreterError(f"tables {cosines.shape} and {sines.shape} for {x.shape}, {width} features")
    cosines, sines = cosines[:, None], sines[:, None]
    turned = x[..., :width]
    if call.layer.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., : width // 2], turned[..., width // 2 :]
    pair = (first * cosines - second * sines, first * sines + second * cosines)
    if call.layer.interleaved:
        done = np.stack(pair, axis=-1).reshape(turned.shape)
    else:
        done = np.concatenate(pair, axis=-1)
    return [np.concatenate([done, x[..., width:]], axis=-1)]


@rule("KV_CACHE_UPDATE", "IKVCacheUpdateLayer")
def kv_cache_update(call: Call) -> list[Array]:
    """op:KVCacheUpdate, guide:transformers-kv-cache. In place: cache[i, :, write_indices[i] + s, :] = update[i, :, s, :].

    PACKED_NHD updates are [tokens, N, H], those of batch element i from update_lengths[i] to [i + 1]; the first length is 0, the
    last all tokens. Nothing may be written past the cache's end. That the cache is an input and the result an output at the same
    address is checked where the network is read.
    """
    layer, cache, update, starts = call.layer, call[0], call[1], call[2]
    if layer.cache_mode.name != "LINEAR":
        raise InterpreterError(f"there is no rule for the mode {layer.cache_mode.name}")
    batch, heads, room, width = cache.shape
    if starts.shape != (batch,):
        raise InterpreterError(f"write indices {starts.shape} for {batch} caches")
    if layer.update_form.name == "PACKED_NHD":
        lengths = call[3]
        good = lengths.shape == (batch + 1,) and lengths[0] == 0 and lengths[-1] == len(update)
        if not good or (np.diff(lengths) < 0).any() or update.shape[1:] != (heads, width):
            raise InterpreterError(
                f"update lengths {lengths.shape} for an update {update.shape} of {cache.shape}"
            )
        rows = np.diff(lengths)
        parts = [(int(i), update[lengths[i] : lengths[i + 1]].swapaxes(0, 1)) for i in np.flatnonzero(rows)]
    else:
        rows = np.full(batch, update.shape[2])
        parts = [(i, update[i]) for i in range(batch)]
    if (starts < 0).any() or (starts + rows > room).any():
        worst = int(np.argmax(starts + rows))
        raise InterpreterError(f"{rows[worst]} tokens at {starts[worst]} of a cache of {room}")
    for i, part in parts:
        cache[i, :, starts[i] : starts[i] + part.shape[1], :] = part
    return [cache]


@rule("ATTENTION_INPUT", "IAttentionInputLayer")
def attention(call: Call) -> list[Array]:
    """op:Attention, guide:transformers-fused-attention. softmax(Q · Kᵀ, masked) · V over [B, N, S, H]; there is no scale.

    Query heads share a key head in groups, in order. A boolean mask is true where attending is allowed; a float mask is added. A
    causal kind allows j <= i, or j <= i + (s_kv - s_q). Of key_value_lengths [B] the API says that they are the keys' lengths:
    keys past them are not there. Whether LOWER_RIGHT then counts from them or from the padded s_kv is not said, so a network that
    would depend on it is refused (backends/tensorrt/bindings.py). Weights are rounded to V's type, as a product's factors.
    """
    found = call.layer.attention
    q, k, v = (call.by_name[found.get_input(i).name] for i in range(3))
    forms = {found.query_form.name, found.key_value_form.name}
    if (
        forms != {"PADDED_BHND"}
        or found.norm_op.name != "SOFTMAX"
        or found.normalization_quantize_scale is not None
    ):
        raise InterpreterError(
            f"forms {sorted(forms)}, normalisation {found.norm_op.name}, or it is quantised"
        )
    heads, kv_heads, rows, keys = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    if heads % kv_heads or v.shape[:3] != k.shape[:3]:
        raise InterpreterError(f"query {q.shape}, key {k.shape}, value {v.shape}")
    kind = call.layer.get_input(2).dtype.name if call.rounding else "FLOAT"
    grouped = q.reshape(q.shape[0], kv_heads, heads // kv_heads * rows, q.shape[3])
    scores = (grouped @ k.swapaxes(-1, -2)).reshape(*q.shape[:3], keys)
    seen = np.ones((1, 1, 1, keys), np.bool_)
    i, j = np.arange(rows)[:, None], np.arange(keys)
    causal = found.causal_kind.name
    if found.key_value_lengths is not None:
        lengths = call.by_name[found.key_value_lengths.name]
        if causal == "LOWER_RIGHT" and rows > 1 and (lengths != keys).any():
            raise InterpreterError(
                "LOWER_RIGHT beside key_value_lengths is not documented for several queries and padded keys"
            )
        seen = seen & (j < lengths[:, None, None, None])
    if causal == "UPPER_LEFT":
        seen = seen & (j <= i)
    elif causal == "LOWER_RIGHT" and (found.key_value_lengths is None or rows > 1):
        seen = seen & (j <= i + keys - rows)
    if found.mask is not None:
        mask = call.by_name[found.mask.name]
        if mask.dtype == np.bool_:
            seen = seen & mask
        else:
            scores = scores + mask
    with np.errstate(invalid="ignore"):
        scores = np.where(seen, scores, np.float32(-np.inf))
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = rounded(powers / powers.sum(axis=-1, keepdims=True), kind)
        mixed = weights.reshape(q.shape[0], kv_heads, heads // kv_heads * rows, keys) @ v
    return [mixed.reshape(*q.shape[:3], v.shape[3])]


@rule("ATTENTION_OUTPUT", "IAttentionOutputLayer")
def attention_output(call: Call) -> list[Array]:
    """api:IAttentionOutputLayer. The end of the attention that its input layer computes: passed on."""
    return [call[0]]
