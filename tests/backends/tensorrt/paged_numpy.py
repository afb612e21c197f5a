"""A tiny language model in numpy, twice: over a network's bound arrays (bindings.py), page by page, and whole, with no pages.

One layer a KV group: group 0 sees every token, group 1 a window of 6. Keys and values are rounded to f16 as the pools hold them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from enginewright.backends.tensorrt.bindings import Limits
from enginewright.backends.tensorrt.pools import Description, KvGroupLayers, KvLayerShape

VOCAB, WIDTH, HEADS, PAGE, WINDOW = 23, 12, 4, 4, 6
GROUPS = (
    KvGroupLayers(0, (KvLayerShape(2, 8, 6, "f16"),)),
    KvGroupLayers(WINDOW, (KvLayerShape(1, 6, 8, "f16"),)),
)
LIMITS = Limits(sequences=6, tokens=16, context=64, page_size=PAGE, pages=(41, 41))
DESCRIPTION = Description(GROUPS, LIMITS, VOCAB)

Floats = np.ndarray
_random = np.random.default_rng(5)


def _matrix(*shape: int) -> Floats:
    return _random.normal(0, 0.5, shape).astype(np.float32)


EMBEDDING, PLACES, HEAD = _matrix(VOCAB, WIDTH), _matrix(LIMITS.context, WIDTH), _matrix(WIDTH, VOCAB)
LAYERS = [
    {
        "q": _matrix(WIDTH, HEADS * layer.key_dim),
        "k": _matrix(WIDTH, layer.kv_heads * layer.key_dim),
        "v": _matrix(WIDTH, layer.kv_heads * layer.value_dim),
        "o": _matrix(HEADS * layer.value_dim, WIDTH),
    }
    for (layer,) in (group.layers for group in GROUPS)
]


def _projections(x: Floats, g: int) -> tuple[Floats, Floats, Floats]:
    """q [T, heads, key dim] f32; k, v [T, kv heads, dim] f16."""
    (layer,) = GROUPS[g].layers
    q, k, v = (x @ LAYERS[g][name] for name in "qkv")
    return (
        q.reshape(len(x), HEADS, layer.key_dim),
        k.reshape(len(x), layer.kv_heads, layer.key_dim).astype(np.float16),
        v.reshape(len(x), layer.kv_heads, layer.value_dim).astype(np.float16),
    )


def _attend(q: Floats, keys: Floats, values: Floats, position: int, window: int) -> Floats:
    """One query [heads, key dim] over keys and values [kv heads, K, dim] at positions 0 .. K - 1."""
    at = np.arange(keys.shape[1])
    seen = (at <= position) & (at > position - window if window else True)
    group = HEADS // len(keys)
    out = []
    for head in range(HEADS):
        k, v = keys[head // group].astype(np.float32), values[head // group].astype(np.float32)
        scores = np.where(seen, k @ q[head], -np.inf)
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ v)
    return np.concatenate(out)


def dense(tokens: Sequence[int]) -> Floats:
    """float32 [T, VOCAB] of a whole sequence."""
    x = EMBEDDING[list(tokens)] + PLACES[: len(tokens)]
    for g, group in enumerate(GROUPS):
        q, k, v = _projections(x, g)
        k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
        x = x + np.stack([_attend(q[t], k, v, t, group.window) for t in range(len(x))]) @ LAYERS[g]["o"]
    return (x @ HEAD).astype(np.float32)


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """The next tokens, each the best of `dense`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def network(bound: Mapping[str, Floats]) -> None:
    """The same model over a step's bound arrays: it believes them, and nothing else."""
    x = EMBEDDING[bound["tokens"]] + PLACES[bound["positions"]]
    count = len(x)
    for g, group in enumerate(GROUPS):
        q, k, v = _projections(x, g)
        pools = bound[f"key_pool_{g}_0"], bound[f"value_pool_{g}_0"]
        starts, first, order = (bound[f"page_{name}_{g}"] for name in ("starts", "first", "order"))
        assert starts[0] == 0 and starts[-1] == count and sorted(order) == list(range(count))
        for page in range(len(first)):
            rows = order[starts[page] : starts[page + 1]]
            assert first[page] + len(rows) <= PAGE, "a page is written past its end"
            for pool, new in zip(pools, (k, v), strict=True):
                pool[page, :, first[page] : first[page] + len(rows)] = new[rows].transpose(1, 0, 2)
        query_rows, lens = bound["query_rows"], bound["context_lens"]
        sequences, most = query_rows.shape
        out = np.zeros((sequences, most, LAYERS[g]["o"].shape[0]), np.float32)
        for s in range(sequences):
            gathered = []
            for pool in pools:
                pages = pool[bound[f"page_table_{g}"][s]]  # [P, kv heads, page, dim]
                whole = pages.transpose(1, 0, 2, 3).reshape(pages.shape[1], -1, pages.shape[3])
                hidden = np.arange(whole.shape[1]) >= lens[s]
                gathered.append(np.where(hidden[:, None], np.float16(0), whole))
            for i in range(most):
                position = max(int(lens[s]) - most + i, 0)
                out[s, i] = _attend(q[query_rows[s, i]], *gathered, position, group.window)
        x = x + out.reshape(sequences * most, -1)[bound["row_places"]] @ LAYERS[g]["o"]
    bound["logits"][:] = x[bound["logit_rows"]] @ HEAD
