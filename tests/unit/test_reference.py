"""The float64 oracle against closed forms and torch's attention, then the twin and the merge against it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from splitkv.reference import merge_states_reference, reference_attention, twin_attention

EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On tensors this small, threads wait for each other: on a busy machine the tests took 10 x longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def cache(batch: int, capacity: int, heads: int, head_dim: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
    k = normal(batch, capacity, heads, head_dim, seed=1)
    return k, normal(batch, capacity, heads, v_head_dim, seed=2)


def oracle(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, lse = reference_attention(*args, return_lse=True, **kwargs)
    return out, lse


def close(actual: Tensor, expected: Tensor | float, **tolerance: float) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64).expand_as(actual)
    torch.testing.assert_close(actual.double(), expected, **(tolerance or EXACT))


def all_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], **tolerance: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        close(a, b, **tolerance)


def same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def paged(x: Tensor, page_size: int, table: Tensor, num_pages: int, fill: float) -> Tensor:
    """x [batch, capacity, ...] laid out on the pages that the table names; everything else is fill."""
    pages = torch.full((num_pages, page_size, *x.shape[2:]), fill, dtype=x.dtype)
    for row in range(x.shape[0]):
        for position in range(x.shape[1]):
            pages[table[row, position // page_size], position % page_size] = x[row, position]
    return pages


def torch_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None) -> Tensor:
    """torch's attention in float64; bias [batch, num_q_heads, q_len, keys]. A sink is one more key."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    if sinks is not None:
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
        bias = torch.cat([bias, sinks.double()[None, :, None, None].expand(*bias.shape[:3], 1)], dim=-1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    return out.transpose(1, 2)


# ---- closed forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_len", [1, 16, 17, 300])
def test_zero_query_gives_the_mean_of_v_and_the_log_of_the_count(seq_len: int) -> None:
    k, v = cache(1, 300, 2, 32, 48)
    out, lse = oracle(torch.zeros(1, 6, 32), 100 * k, v, seq_len)
    close(out, v[:, :seq_len].double().mean(dim=1).repeat_interleave(3, dim=1))
    close(lse, math.log(seq_len))
    assert out.shape == (1, 6, 48) and out.dtype == lse.dtype == torch.float64


@pytest.mark.parametrize("place", [0, 77, 5000])
def test_needle_is_found_across_loads(place: int) -> None:
    """One key has logit 24, all others 0; 5001 keys are more than the oracle loads at once."""
    q = normal(1, 1, 16)
    k, v = torch.zeros(1, 5001, 1, 16), torch.zeros(1, 5001, 1, 16)
    k[0, place, 0] = 24 * q[0, 0] / q.norm() ** 2
    v[0, place] = 1
    out, lse = oracle(q, k, v, 5001, softmax_scale=1.0)
    mass = math.exp(24) / (math.exp(24) + 5000)
    close(out, mass, rtol=0, atol=1e-6)  # the key itself is rounded to float32
    close(lse, math.log(math.exp(24) + 5000), rtol=0, atol=1e-5)


@pytest.mark.parametrize("ratio", [1, 3, 5, 12])
def test_query_heads_share_the_kv_head_of_their_group(ratio: int) -> None:
    k, _ = cache(1, 40, 4, 16, 16)
    v = torch.arange(1.0, 5.0)[None, None, :, None].expand(1, 40, 4, 16)
    out, _ = oracle(normal(1, 4 * ratio, 16), k, v, 40)
    close(out, (torch.arange(4 * ratio) // ratio + 1.0)[None, :, None])


@pytest.mark.parametrize("window", [1, 16, 17, 400])
@pytest.mark.parametrize("seq_len", [15, 16, 17, 300])
def test_window_counts_the_current_key(window: int, seq_len: int) -> None:
    q, k, v = torch.zeros(1, 1, 16), torch.zeros(1, 300, 1, 16), torch.zeros(1, 300, 1, 16)
    for marked in {seq_len - window - 1, seq_len - window, seq_len - 1} & set(range(seq_len)):
        out, lse = oracle(q, k, v.index_fill(1, torch.tensor([marked]), 1.0), seq_len, window=window)
        close(out, 1 / min(window, seq_len) if marked >= seq_len - window else 0.0)
        close(lse, math.log(min(window, seq_len)))


def test_sink_is_counted_once_and_does_not_move_an_empty_row() -> None:
    k, v = cache(2, 256, 1, 16, 16)
    q, lengths = torch.zeros(2, 2, 16), torch.tensor([256, 0])
    out, lse = oracle(q, k, v, lengths, window=64, sinks=torch.full((2,), math.log(64), dtype=torch.float64))
    close(out[0], 0.5 * v[0, -64:].double().mean(dim=0).expand(2, 16))
    close(lse[0], math.log(128))
    close(out[1], 0.0)
    close(lse[1], -math.inf)

    same(oracle(q, k, v, lengths), oracle(q, k, v, lengths, sinks=torch.full((2,), -math.inf)))
    huge = twin_attention(q, k, v, 256, sinks=torch.full((2,), 200.0), split_len=64, return_lse=True)
    all_close(huge, (torch.zeros(()), torch.tensor(200.0)), rtol=0, atol=1e-4)


def test_softcap_comes_after_scale_and_before_mask_and_never_touches_the_sink() -> None:
    logits, scale = torch.tensor([40.0, -40.0, 0.0, 40.0]), 1 / 8
    k = torch.zeros(1, 4, 1, 16)
    k[0, :, 0, 0] = logits / scale
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1
    v = torch.tensor([1.0, 2.0, 3.0, 99.0])[None, :, None, None].expand(1, 4, 1, 16)
    visible = torch.tensor([True, True, True, False])
    sink = torch.tensor([7.0])  # above the cap: capped, it would lose most of its weight
    options = {"softmax_scale": scale, "softcap": 5.0, "sinks": sink}
    results = [
        reference_attention(q, k, v, 4, mask=mask, return_lse=True, return_scores=True, **options)
        for mask in (visible, torch.zeros(4).masked_fill(~visible, -math.inf))
    ]
    capped = 5 * torch.tanh(logits.double() / 5)
    weights = torch.cat([capped[:3], sink]).exp()
    for out, lse, scores in results:
        close(out, (weights[:3] @ v[0, :3, 0, 0].double() / weights.sum()).item())
        close(lse, math.log(weights.sum()))
        close(scores, capped)  # before the mask
    off = [reference_attention(q, k, v, 4, softcap=cap) for cap in (None, 0.0)]
    assert torch.equal(off[0], off[1])


def test_causal_rule_and_starts() -> None:
    """q_len 4 over 10 keys: query i sees 7 + i of them, less the padding in front."""
    k, v = cache(2, 12, 1, 16, 16)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    out, lse = oracle(torch.zeros(2, 4, 1, 16), k, v, 10, starts=starts)
    close(lse[0, :, 0], torch.tensor([7.0, 8, 9, 10]).log().double(), rtol=1e-7, atol=0)
    close(lse[1, :, 0].exp(), torch.tensor([0.0, 0, 1, 2]))
    close(out[1, :2], 0.0)
    close(out[1, 3], v[1, 8:10].double().mean(dim=0))
    empty = oracle(torch.zeros(2, 4, 1, 16), k, v, 2)[1]  # a row shorter than its queries
    close(empty[0, :, 0].exp(), torch.tensor([0.0, 0, 1, 2]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_decoded_and_then_scaled_per_kv_head(dtype: torch.dtype) -> None:
    k, v = (x.to(dtype) for x in cache(2, 37, 2, 16, 16))
    q, lengths = normal(2, 4, 16), torch.tensor([37, 20])
    k_scale, v_scale = torch.tensor([0.25, 1.0]), torch.tensor([0.5, 2.0])
    expected = oracle(q, k.double() * k_scale[:, None], v.double() * v_scale[:, None], lengths)
    actual = oracle(q, k, v, lengths, k_scale=k_scale, v_scale=v_scale)
    all_close(actual, expected)
    for scalar in (0.25, torch.tensor(0.25)):
        close(oracle(q, k, v, lengths, k_scale=scalar)[1], oracle(q, k.double() / 4, v, lengths)[1])
        close(oracle(q, k, v, lengths, v_scale=scalar)[0], oracle(q, k, v, lengths)[0] / 4)
    same(oracle(q, k, v, lengths, k_scale=1.0, v_scale=1.0), oracle(q, k, v, lengths))


# ---- torch's attention, random arguments -------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of one call over a capacity of 24, with lengths that are in and out of range."""
    batch, q_len, num_kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    num_q_heads, capacity = num_kv_heads * draw(st.integers(1, 3)), 24
    lengths = draw(st.lists(st.integers(-1, 26), min_size=batch, max_size=batch))
    k, v = cache(batch, capacity, num_kv_heads, 16, 32)
    options: dict[str, Any] = {"window": draw(st.none() | st.integers(1, 30))}
    if draw(st.booleans()):
        options["sinks"] = normal(num_q_heads)
    if draw(st.booleans()):
        options["starts"] = torch.tensor(draw(st.lists(st.integers(0, 24), min_size=batch, max_size=batch)))
    if draw(st.booleans()):
        shape = [n if draw(st.booleans()) else 1 for n in (batch, num_q_heads, q_len, capacity)]
        bias = normal(*shape)
        options["mask"] = bias > -1 if draw(st.booleans()) else bias.masked_fill(bias < -1, -math.inf)
    q = normal(batch, q_len, num_q_heads, 16)
    return {"q": q, "k_cache": k, "v_cache": v, "seq_lens": torch.tensor(lengths), **options}


def bias_of(call: dict[str, Any]) -> Tensor:
    """The visible keys of every query as an additive mask, written down again from the contract."""
    batch, q_len, num_q_heads, _ = call["q"].shape
    capacity = call["k_cache"].shape[1]
    key, query = torch.arange(capacity), torch.arange(q_len)[:, None]
    end = call["seq_lens"].clamp(0, capacity)[:, None, None] - q_len + 1 + query
    visible = key < end
    if call["window"] is not None:
        visible = visible & (key >= end - call["window"])
    if "starts" in call:
        visible = visible & (key >= call["starts"][:, None, None])
    bias = torch.zeros(batch, num_q_heads, q_len, capacity, dtype=torch.float64)
    bias = bias.masked_fill(~visible[:, None], -math.inf)
    mask = call.get("mask", torch.zeros(()))
    return bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask


@settings(max_examples=200)
@given(calls())
def test_oracle_equals_torch(call: dict[str, Any]) -> None:
    out, lse, scores = reference_attention(**call, return_lse=True, return_scores=True)
    bias = bias_of(call)
    empty = (bias == -math.inf).all(dim=-1).transpose(1, 2)
    expected = torch_attention(call["q"], call["k_cache"], call["v_cache"], bias, call.get("sinks"))
    close(out, expected.masked_fill(empty[..., None], 0.0))

    in_range = bias_of({**call, "mask": torch.zeros(())}).transpose(1, 2) == 0
    assert torch.equal(scores.isfinite(), in_range)
    sinks = call.get("sinks", torch.tensor(-math.inf)).double().expand(*lse.shape)[..., None]
    logits = torch.cat([scores.masked_fill(~in_range, 0.0) + bias.transpose(1, 2), sinks], dim=-1)
    close(lse, logits.logsumexp(dim=-1).masked_fill(empty, -math.inf))


@settings(max_examples=100)
@given(calls(), st.sampled_from([1, 3, 8]), st.sampled_from([math.nan, math.inf, 6e4]))
def test_pages_and_poison_change_nothing(call: dict[str, Any], page_size: int, poison: float) -> None:
    """Keys that no query of a row may see hold NaN, Inf or huge values, and so do the pages' unused bytes."""
    expected = reference_attention(**call, return_lse=True, return_scores=True)
    unseen = (bias_of({**call, "mask": torch.zeros(())}) == -math.inf).all(dim=2).all(dim=1)[..., None, None]
    poisoned = {name: call[name].masked_fill(unseen, poison) for name in ("k_cache", "v_cache")}

    batch, capacity = call["k_cache"].shape[:2]
    max_pages = capacity // page_size
    num_pages = batch * max_pages + 2
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(page_size))
    table = order[: batch * max_pages].view(batch, max_pages).to(torch.int32)
    in_pages = {name: paged(x, page_size, table, num_pages, poison) for name, x in poisoned.items()}
    for row, length in enumerate(call["seq_lens"].clamp(0, capacity).tolist()):
        table[row, -(-length // page_size) :] = 2**31 - 1

    for elsewhere in (poisoned, {**in_pages, "block_table": table}):
        same(reference_attention(**{**call, **elsewhere}, return_lse=True, return_scores=True), expected)
    twins = [twin_attention(**{**call, **other}, split_len=5, block_n=2) for other in ({}, poisoned)]
    assert torch.equal(*twins)


@pytest.mark.parametrize("page", [-1, 2, 2**31 - 1, -(2**31)])
def test_keys_on_pages_out_of_range_are_absent(page: int) -> None:
    k, v = cache(1, 8, 1, 16, 16)
    pages = [x.view(2, 4, 1, 16) for x in (k, v)]
    table = torch.tensor([[0, page, 1]], dtype=torch.int32)
    q = normal(1, 2, 16)
    out, lse = oracle(q, *pages, 12, block_table=table)
    all_close((out, lse), oracle(q, k, v, 8))
    scores = reference_attention(q, *pages, 12, block_table=table, return_scores=True)[1]
    assert (scores[..., 4:8] == -math.inf).all() and scores.isfinite().sum() == 16
    close(twin_attention(q, *pages, 12, block_table=table, split_len=6, block_n=4), out, rtol=0, atol=1e-6)
    assert (oracle(q, *pages, 4, block_table=table[:, 1:])[1] == -math.inf).all()


def test_nothing_to_see_gives_zeros_and_no_nan() -> None:
    k, v = cache(2, 8, 1, 16, 16)
    q, sinks, no_pages = normal(2, 1, 16), torch.ones(1), torch.zeros(2, 0, dtype=torch.int32)
    for attend in (oracle, lambda *a, **kw: twin_attention(*a, split_len=4, return_lse=True, **kw)):
        for kwargs in (
            {"seq_lens": 0},
            {"seq_lens": -3},
            {"seq_lens": 8, "mask": torch.zeros(1, dtype=torch.bool)},
            {"seq_lens": 8, "mask": torch.tensor(-math.inf)},
            {"seq_lens": 8, "starts": 8},
            {"seq_lens": 8, "block_table": no_pages},
        ):
            out, lse = attend(q, k * math.nan, v * math.nan, **kwargs, sinks=sinks)
            close(out, 0.0)
            close(lse, -math.inf)
    assert oracle(q, k[:, :0], v[:, :0], 5)[0].abs().sum() == 0
    assert oracle(q, k[:0], v[:0], 5, block_table=torch.zeros(2, 1, dtype=torch.int32))[0].abs().sum() == 0


def test_strides_dtypes_int_lengths_and_out() -> None:
    k, v = normal(2, 20, 2, 2, 16, dtype=torch.bfloat16).unbind(2)
    q, out = normal(2, 6, 16, dtype=torch.float16), torch.empty(2, 6, 16, dtype=torch.float16)
    ignored = {"policy": "auto", "backend": "cpu", "workspace": None}
    result = reference_attention(q, k, v, torch.tensor([20, 20], dtype=torch.int32), out=out, **ignored)
    assert torch.equal(result, reference_attention(q.double(), k.double(), v.double(), 20))
    assert torch.equal(out, result.half())

    q, latent = normal(1, 4, 48), normal(1, 9, 1, 48)  # absorbed MLA: V is the first columns of K
    shared = reference_attention(q, latent, latent[..., :32], 9)
    assert torch.equal(shared, reference_attention(q, latent.clone(), latent[..., :32].clone(), 9))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": torch.zeros(1, 3, 16)}, ValueError, "q: .*multiple of num_kv_heads 2.* 3"),
        ({"q": torch.zeros(1, 4, 16, dtype=torch.int8)}, TypeError, r"q: .*torch.int8"),
        ({"q": torch.zeros(2, 4, 16)}, ValueError, "k_cache: .*batch.*2"),
        ({"k_cache": torch.zeros(1, 8, 2, 32)}, ValueError, "k_cache: .*16.*32"),
        ({"k_cache": torch.zeros(1, 8, 2, 16, dtype=torch.uint8)}, TypeError, "k_cache: .*uint8"),
        ({"v_cache": torch.zeros(1, 9, 2, 16)}, ValueError, "v_cache: .*8.*9"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int32)}, ValueError, r"seq_lens: .*\[1\].*\[2\]"),
        ({"seq_lens": torch.zeros(1)}, TypeError, "seq_lens: .*float32"),
        ({"block_table": torch.zeros(1, dtype=torch.int32)}, ValueError, "block_table"),
        ({"window": -1}, ValueError, "window: .*-1"),
        ({"softcap": -1.0}, ValueError, "softcap: .*-1"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks: .*\[4\].*3"),
        ({"k_scale": torch.zeros(4)}, ValueError, r"k_scale: .*\[2\].*4"),
        ({"mask": torch.zeros(7)}, ValueError, "mask: .*8.*7"),
        ({"mask": torch.zeros(8, dtype=torch.int32)}, TypeError, "mask: .*int32"),
        ({"out": torch.zeros(1, 4, 32)}, ValueError, "out: .*16.*32"),
    ],
)
def test_bad_input_is_refused_by_name(change: dict[str, Any], error: type[Exception], words: str) -> None:
    k = torch.zeros(1, 8, 2, 16)
    good = {"q": torch.zeros(1, 4, 16), "k_cache": k, "v_cache": k, "seq_lens": 8}
    with pytest.raises(error, match=words):
        reference_attention(**{**good, **change})


# ---- the twin ----------------------------------------------------------------------------------------------


def long_call() -> dict[str, Any]:
    k, v = cache(2, 2100, 2, 64, 48)
    return {"q": normal(2, 8, 64), "k_cache": k, "v_cache": v, "seq_lens": torch.tensor([2100, 1337])}


@pytest.mark.parametrize("split_len", [64, 79, 1024, lambda span: -(-span // 16)])
@pytest.mark.parametrize("fan_out", [2, 4])
def test_twin_is_within_1e_5_of_the_oracle(split_len: Any, fan_out: int) -> None:
    call = {**long_call(), "sinks": normal(8)}
    twin = twin_attention(**call, split_len=split_len, fan_out=fan_out, return_lse=True)
    assert {x.dtype for x in twin} == {torch.float32}
    all_close(twin, oracle(**call), rtol=0, atol=1e-5)


@pytest.mark.parametrize("split_len", [3, 7, 500])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 50, "softcap": 2.0},
        {"starts": 40, "k_scale": torch.tensor([0.5, 2.0]), "v_scale": 0.25},
        {"mask": normal(1, 8, 3, 203), "softmax_scale": 0.3},
        {"mask": normal(2, 1, 1, 203) > 0, "sinks": normal(8)},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_twin_with_tiny_splits_and_every_option(split_len: int, options: dict[str, Any]) -> None:
    dtype = torch.float8_e4m3fn if "k_scale" in options else torch.float16
    k, v = (x.to(dtype) for x in cache(2, 203, 2, 32, 32))
    call = {"q": normal(2, 3, 8, 32), "k_cache": k, "v_cache": v, "seq_lens": torch.tensor([203, 1])}
    call |= options
    twin = twin_attention(**call, split_len=split_len, return_lse=True)
    all_close(twin, oracle(**call), rtol=0, atol=1e-5)


@settings(max_examples=100)
@given(calls(), st.integers(1, 30), st.sampled_from([1, 2, 16]), st.integers(2, 5))
def test_twin_equals_the_oracle(call: dict[str, Any], split_len: int, block_n: int, fan_out: int) -> None:
    twin = twin_attention(**call, split_len=split_len, block_n=block_n, fan_out=fan_out, return_lse=True)
    all_close(twin, oracle(**call), rtol=0, atol=1e-5)


def test_one_split_and_empty_splits_change_no_bit() -> None:
    call = long_call()
    unsplit = twin_attention(**call, split_len=10**9)
    spans: list[int] = []
    assert torch.equal(unsplit, twin_attention(**call, split_len=lambda span: spans.append(span) or span))
    assert spans == [2100, 1337]
    assert torch.equal(unsplit, twin_attention(**call, split_len=2100))

    key = torch.arange(2100)
    hidden = (key < 640) | (key >= 1280)  # splits 0 to 4 and 10 on see nothing; the others have one parent
    masked = twin_attention(**call, mask=~hidden, split_len=128, fan_out=32)
    shorter = {name: call[name][:, 640:1280] for name in ("k_cache", "v_cache")}
    within = twin_attention(**{**call, **shorter, "seq_lens": 640}, split_len=128, fan_out=32)
    assert torch.equal(masked, within)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    call = long_call()
    both = twin_attention(**call, split_len=79)
    alone = twin_attention(**{name: x[1:] for name, x in call.items()}, split_len=79)
    assert torch.equal(both[1:], alone)


def test_mutant_without_rescale_is_caught() -> None:
    call = long_call()
    expected = reference_attention(**call)
    mutant = twin_attention(**call, split_len=64, drop_rescale=True)
    assert (mutant - expected).abs().max() > 1e-3


def test_twin_refuses_bad_plans() -> None:
    call = long_call()
    for name, value in {"split_len": 0, "block_n": 0, "fan_out": 1}.items():
        with pytest.raises(ValueError, match=name):
            twin_attention(**{**call, "split_len": 64, name: value})


# ---- merging normalised parts ------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.integers(0, 24), min_size=1, max_size=5))
def test_merged_parts_equal_the_whole(cuts: list[int]) -> None:
    k, v = cache(1, 24, 2, 16, 16)
    q = normal(1, 4, 16)
    bounds = [0, *sorted(cuts), 24]
    parts = [oracle(q, k, v, end, starts=start) for start, end in pairwise(bounds)]
    merged = merge_states_reference(*(torch.stack(x) for x in zip(*parts, strict=True)))
    all_close(merged, oracle(q, k, v, 24))


def test_merge_selects_empty_parts_away() -> None:
    x, inf = normal(1, 2, 16), math.inf
    out, lse = merge_states_reference(torch.cat([x * math.nan, x]), torch.tensor([[-inf, -inf], [1.5, -8e4]]))
    assert torch.equal(out, x[0].double())
    assert lse.tolist() == [1.5, -8e4]
    out, lse = merge_states_reference(x.expand(3, 2, 16) * math.nan, torch.full((3, 2), -inf))
    assert out.tolist() == [[0.0] * 16] * 2 and lse.tolist() == [-inf, -inf]
    three_to_one = torch.tensor([3000.0, 1000.0], dtype=torch.float64).log()[:, None]
    out, lse = merge_states_reference(torch.tensor([1.0, 0.0])[:, None, None], three_to_one)
    close(out, 0.75)
    close(lse, math.log(4000))
    assert merge_states_reference(x, torch.tensor([[8e4, 1e4]]))[1].tolist() == [8e4, 1e4]
    with pytest.raises(ValueError, match="lses"):
        merge_states_reference(x, torch.zeros(2, 1))
    with pytest.raises(ValueError, match="outs"):
        merge_states_reference(x[:0], torch.zeros(0, 2))
