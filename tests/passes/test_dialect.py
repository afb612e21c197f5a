"""Every dialect op: its shape function against its reference, and the references against plain formulas."""

import pytest
import torch
from torch.nn import functional as F

from enginewright.passes import dialect
from enginewright.passes.dialect import OPS
from enginewright.passes.dialect.numerics import dequantise, simulate_activation
from enginewright.passes.dialect.paged_attention import round_kv

ew = torch.ops.ew
T, H, D = 5, 4, 6


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(*shape, high=4):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


IDS = whole(T).int()
SINKS = noise(H)
HEADS = (noise(T, H, D), noise(T, 2, D), noise(T, 2, 3), SINKS, None)
POOLS = (torch.zeros(3, 4, 2, D), torch.zeros(3, 4, 2, 3))
STEP = (torch.tensor([0, T]).int(), torch.tensor([T]).int(), torch.tensor([[[2, 0, 1]]]).int())
CODES, SCALES = whole(7, 40, high=16).byte(), noise(7, 2).abs()
ROUTE = (whole(T, 2), noise(T, 2))

ARGUMENTS = {
    "embedding": (IDS, noise(7, D), 1, 2.0),
    "quantised_embedding": (IDS, CODES, SCALES, SCALES, "int4_g32", 1, 2.0),
    "position_table": (IDS, noise(7, 1, D)),
    "linear": (noise(T, 2, D), noise(7, D), noise(7)),
    "quantised_linear": (noise(T, 40), CODES, SCALES, SCALES, noise(7), "int4_g32", "int8_g32"),
    "rms_norm": (noise(T, H, D), noise(D), 1e-5, 1.0),
    "layer_norm": (noise(T, D), noise(D), None, 1e-5),
    "add_rms_norm": (noise(T, D), noise(T, D), noise(D), 1e-5),
    "add_layer_norm": (noise(T, D), noise(T, D), noise(D), noise(D), 1e-5),
    "rope": (noise(T, H, D), noise(T, 2), noise(T, 2), 4, True),
    "attention": (*HEADS, 0.3, 3, 2.0, 0),
    "paged_attention": (*HEADS, *STEP, *POOLS, 0.3, 3, 2.0, 0, 0),
    "activation": (noise(T, D), "gelu"),
    "gated_activation": (noise(T, 2 * D), "silu"),
    "moe": (
        noise(T, D), *ROUTE, noise(4, 10, D), noise(4, 10), noise(4, D, 5), noise(4, D), "swiglu_oai", 1.7,
        2.0,
    ),
    "quantised_moe": (
        noise(T, 40), *ROUTE, whole(4, 10, 40).char(), noise(4, 10, 1), None, None, whole(4, 40, 5).char(),
        noise(4, 40, 1), None, None, "silu", "int8", "f32",
    ),
    "select_rows": (noise(T, D), torch.tensor([4, 0]).int()),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_shape_function_agrees_with_reference(name):
    def describe(result):
        results = result if isinstance(result, (list, tuple)) else [result]
        return [(list(r.shape), r.dtype) for r in results]

    arguments = ARGUMENTS[name]
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    assert describe(OPS[name](*meta)) == describe(OPS[name](*arguments))


def test_names():
    assert dialect.name_of(ew.linear.default) == "linear"
    assert dialect.name_of(torch.ops.aten.add.Tensor) is None
    assert ARGUMENTS.keys() == OPS.keys()


def test_attention_is_scaled_dot_product_attention():
    q, k, v = (x.transpose(0, 1)[None] for x in HEADS[:3])
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)[0].transpose(
        0, 1
    )
    torch.testing.assert_close(ew.attention(*HEADS[:3], None, None, 0.3), want)


def test_attention_with_window_softcap_sinks_and_alibi_row_by_row():
    alibi = noise(H).abs()
    q, k, v = HEADS[:3]
    got = ew.attention(q, k, v, SINKS, alibi, 0.3, 3, 2.0)
    for t in range(T):
        for h in range(H):
            keys = range(max(0, t - 2), t + 1)
            scores = [
                2.0 * torch.tanh(0.3 * (q[t, h] @ k[s, h // 2]) / 2.0) + alibi[h] * (s - t) for s in keys
            ]
            weights = torch.softmax(torch.stack([*scores, SINKS[h]]), 0)
            want = sum(w * v[s, h // 2] for w, s in zip(weights, keys, strict=False))
            torch.testing.assert_close(got[t, h], want)


def test_paged_attention_of_two_sequences_in_mixed_chunks_is_attention():
    q, k, v = noise(9, H, D), noise(9, 2, D), noise(9, 2, 3)
    want = ew.attention(q, k, v, None, None, 0.3, 4)
    pools = [torch.full((8, 2, 2, width), float("nan")) for width in (D, 3)]
    tables = torch.tensor([[[7, 1, 4, 2, 0], [3, 5, 6, -1, -1]]]).int()
    got = torch.empty(9, H, 3)
    for first, second in (((0, 4), (0, 1)), ((4, 5), (1, 6)), ((5, 9), (6, 6))):
        rows = torch.cat([torch.arange(*first), torch.arange(*second)])
        starts = torch.tensor([0, first[1] - first[0], len(rows)]).int()
        lengths = torch.tensor([first[1], second[1]]).int()
        out = ew.paged_attention(
            q[rows], k[rows], v[rows], None, None, starts, lengths, tables, *pools, 0.3, 4
        )
        got[first[0] : first[1]] = out[: first[1] - first[0]]
        torch.testing.assert_close(out[first[1] - first[0] :], want[second[0] : second[1]])
    torch.testing.assert_close(got, want)


def test_an_int8_cache_keeps_codes_and_one_scale_a_head():
    x = noise(5, 2, 40) * torch.logspace(-3, 3, 5)[:, None, None]
    x[0, 0] = 0
    x[1, 1] = 2.0**-101
    rounded = round_kv(x, "int8")
    limit = x.abs().amax(-1, keepdim=True)
    assert rounded[0, 0].abs().max() == rounded[1, 1].abs().max() == 0
    codes = (rounded * 127 / limit.clamp(min=1e-30)).round()
    torch.testing.assert_close(codes * limit / 127, rounded)
    assert ((rounded - x).abs() <= limit / 254 * 1.0001 + 2.0**-101).all() and codes.abs().max() == 127
    assert torch.equal(round_kv(x, "bf16"), x.bfloat16().float()) and round_kv(x, "f32") is x
    assert torch.equal(round_kv(x, "f16"), x.half().float())
    ties = torch.tensor([127.0, 0.5, 1.5, -2.5])
    assert round_kv(ties, "int8").tolist() == [127.0, 0.0, 2.0, -2.0]
    with pytest.raises(ValueError, match="unknown cache format 'fp4'; known: f32, f16, bf16, int8"):
        round_kv(x, "fp4")


def attention_of_a_cache(q, k, v, sinks, scale, window, kv_format):
    """The definition of a bf16 or int8 cache's attention written out, one query and head at a time, in float64."""
    bf16 = lambda x: x.float().bfloat16().double()  # noqa: E731
    codes_of = lambda x: (x * (127 / x.abs().amax(-1, keepdim=True))).round().double()  # noqa: E731
    value_scale = v.abs().amax(-1).double() / 127
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    keys = round_kv(k, kv_format).double()
    for t in range(len(q)):
        for h in range(q.shape[1]):
            of = h // (q.shape[1] // k.shape[1])
            total, largest, spans = 0.0, float(sinks[h]), []
            for first in range(0, t + 1, 512):
                at = [p for p in range(first, min(first + 512, t + 1)) if not window or p > t - window]
                if at:
                    scores = scale * (keys[at, of] @ bf16(q[t, h]))
                    spans.append((at, scores, scores.max()))
                    largest = max(largest, float(scores.max()))
            total = torch.exp(torch.tensor(float(sinks[h]) - largest))
            for at, scores, top in spans:
                weights, join = torch.exp(scores - top), torch.exp(top - largest)
                if kv_format == "int8":
                    out[t, h] += join * (bf16(weights * value_scale[at, of]) @ codes_of(v[at, of]))
                    total += join * weights.sum()
                else:
                    out[t, h] += join * (bf16(weights) @ bf16(v[at, of]))
                    total += join * bf16(weights).sum()
            out[t, h] /= total
    return out.float()


@pytest.mark.parametrize("window", [0, 4, 520])
@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_paged_attention_multiplies_what_the_cache_keeps(kv_format, window):
    """Spans of 512 are crossed; weights that lie at a tie of bf16 may fall to either side."""
    length = 530
    q, k, v = noise(length, 2, D), noise(length, 1, D), noise(length, 1, 3)
    pages = torch.randperm(34, generator=torch.Generator().manual_seed(1)).int()
    pools = [torch.full((34, 16, 1, width), float("nan")) for width in (D, 3)]
    step = (torch.tensor([0, length]).int(), torch.tensor([length]).int(), pages[None, None])
    sinks = noise(2)
    got = ew.paged_attention(q, k, v, sinks, None, *step, *pools, 0.3, window, kv_format=kv_format)
    want = attention_of_a_cache(q, k, v, sinks, 0.3, window, kv_format)
    error = (got - want).abs() / want.abs().max()
    assert error.max() < 2e-3 and error.mean() < 1e-5
    exact = ew.attention(q, round_kv(k, kv_format), round_kv(v, kv_format), sinks, None, 0.3, window)
    assert 1e-4 < ((got - exact).abs() / want.abs().max()).max() < 0.02


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_paged_attention_writes_what_the_cache_keeps(kv_format):
    q, k, v = noise(6, H, D), noise(6, 2, D), noise(6, 2, 3)
    pools = [torch.full((3, 2, 2, width), float("nan")) for width in (D, 3)]
    step = (torch.tensor([0, 6]).int(), torch.tensor([6]).int(), torch.tensor([[[2, 0, 1]]]).int())
    ew.paged_attention(q, k, v, None, None, *step, *pools, 0.3, 4, kv_format=kv_format)
    k, v = round_kv(k, kv_format), round_kv(v, kv_format)
    assert torch.equal(pools[0][[2, 0, 1]].reshape(6, 2, D), k)


def test_experts_add_up():
    x, index, weight, gate_up, _, down, *_ = ARGUMENTS["moe"]
    got = ew.moe(x, index, weight, gate_up, None, down, None, "silu")
    for t in range(T):
        parts = []
        for e, w in zip(index[t].tolist(), weight[t], strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            parts.append(w * (down[e] @ (F.silu(gate) * up)))
        torch.testing.assert_close(got[t], sum(parts))


def test_short_last_groups():
    weight = dequantise(CODES, SCALES, -SCALES, "int4_g32")
    torch.testing.assert_close(weight[:, :32], SCALES[:, :1] * (CODES[:, :32].float() - 1))
    torch.testing.assert_close(weight[:, 32:], SCALES[:, 1:] * (CODES[:, 32:].float() - 1))
    x = noise(3, 40)
    rounded = simulate_activation(x, "int8_g32")
    assert rounded.shape == x.shape
    assert (rounded[:, 32:] - x[:, 32:]).abs().max() <= x[:, 32:].abs().max() / 254 + 1e-7
    assert torch.equal(simulate_activation(torch.zeros(2, 40), "int8_g32"), torch.zeros(2, 40))
    with pytest.raises(ValueError, match="unknown activation format 'q8'"):
        simulate_activation(x, "q8")


def test_activations_of_a_token_and_of_all_tokens():
    x = noise(3, 40)
    scales = x.abs().amax(-1, keepdim=True) / 127
    torch.testing.assert_close(simulate_activation(x, "int8"), torch.round(x / scales) * scales)
    fixed = simulate_activation(x, "int8_static", 0.01)
    torch.testing.assert_close(fixed, torch.round(x / 0.01).clamp(-127, 127) * 0.01)
    assert fixed.abs().max() <= 1.27 + 1e-6


def test_outlier_columns_are_multiplied_apart():
    x, codes, scales = noise(4, 40), CODES.to(torch.int8), SCALES[:, :1].contiguous()
    columns = torch.tensor([3, 39], dtype=torch.int32)
    x[:, 3] *= 100
    kept = noise(CODES.shape[0], 2).bfloat16()
    codes = codes.index_fill(1, columns.long(), 0)
    got = ew.quantised_linear(x, codes, scales, None, None, "int8", "int8", columns, kept)
    rest = simulate_activation(x.index_fill(1, columns.long(), 0), "int8")
    want = rest @ (codes.float() * scales).T + x[:, [3, 39]].bfloat16().float() @ kept.float().T
    torch.testing.assert_close(got, want)
