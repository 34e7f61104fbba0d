"""merge_states: attention over disjoint sets of keys, put together again. CASE-06 and CASE-24 of the bug survey."""

from __future__ import annotations

import math
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitkv import decode_attention, merge_states
from splitkv.reference import merge_states_reference, reference_attention

INF = math.inf
ULP = torch.finfo(torch.float32).eps


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def merged(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    outs, lses = zip(*parts, strict=True)
    return merge_states(torch.stack(outs), torch.stack(lses))


def close(actual: Tensor, expected: Tensor | float, atol: float) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64).expand_as(actual)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


# ---- CASE-06: the base of the logarithm --------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["auto", "off", "7"])
def test_lse_is_a_natural_logarithm(policy: str) -> None:
    k = normal(1, 1000, 1, 64)
    _, lse = decode_attention(torch.zeros(1, 2, 64), k, k, 1000, policy=policy, return_lse=True)
    close(lse, math.log(1000), atol=1e-5)  # in base 2 it would be 9.97


def test_merged_lengths_weigh_as_their_keys() -> None:
    """3000 keys of value 1 and 1000 of value 0 give 0.75; bases that are mixed up give 0.83."""
    q, k = torch.zeros(1, 2, 32), normal(1, 3000, 1, 32)
    parts = [
        decode_attention(q, k[:, :keys], torch.full((1, keys, 1, 32), value), keys, return_lse=True)
        for keys, value in ((3000, 1.0), (1000, 0.0))
    ]
    out, lse = merged(*parts)
    close(out, 0.75, atol=1e-6)
    close(lse, math.log(4000), atol=1e-5)

    weights = torch.stack([lse for _, lse in parts]).double().softmax(dim=0)  # a plain merge, in natural logs
    plain = (weights.unsqueeze(-1) * torch.stack([out for out, _ in parts])).sum(dim=0)
    close(out, plain, atol=1e-6)


# ---- CASE-24: nothing to merge, and extremes ---------------------------------------------------------------


@pytest.mark.parametrize("held", [0.0, math.nan, INF, 7.0])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_only_empty_parts_give_the_identity(parts: int, held: float) -> None:
    out, lse = merge_states(torch.full((parts, 2, 3, 16), held), torch.full((parts, 2, 3), -INF))
    assert torch.equal(out, torch.zeros(2, 3, 16)) and torch.equal(lse, torch.full((2, 3), -INF))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("held", [math.nan, INF, -INF])
def test_empty_parts_are_selected_away_bit_for_bit(dtype: torch.dtype, held: float) -> None:
    x = normal(2, 16).to(dtype)
    value, empty = (x, torch.full((2,), 1.5)), (torch.full_like(x, held), torch.full((2,), -INF))
    for parts in ([empty, value], [value, empty], [empty, empty, value, empty], [value]):
        out, lse = merged(*parts)
        assert torch.equal(out, x) and torch.equal(lse, value[1])
        assert out.dtype == dtype and lse.dtype == torch.float32


def test_five_parts_of_which_three_are_empty() -> None:
    outs, lses = normal(5, 2, 16), torch.tensor([-INF, 0.5, -INF, 2.0, -INF])[:, None].repeat(1, 2)
    outs[0], outs[2], outs[4] = math.nan, INF, -INF
    out, lse = merge_states(outs, lses)
    both = merge_states(outs[[1, 3]], lses[[1, 3]])
    assert torch.equal(out, both[0]) and torch.equal(lse, both[1])
    close(out, merge_states_reference(outs, lses)[0], atol=4 * ULP)


def test_empty_in_one_row_only() -> None:
    """Emptiness is each row's own: row 0 lacks part 1, row 1 lacks both, row 2 lacks none."""
    outs = normal(2, 3, 16)
    outs[1, 0] = outs[0, 1] = outs[1, 1] = math.nan
    lses = torch.tensor([[1.0, -INF, 0.0], [-INF, -INF, 0.0]])
    out, lse = merge_states(outs, lses)
    assert torch.equal(out[0], outs[0, 0]) and torch.equal(out[1], torch.zeros(16))
    close(out[2], (outs[0, 2].double() + outs[1, 2]) / 2, atol=4 * ULP)
    close(lse, torch.tensor([1.0, -INF, math.log(2)]), atol=ULP)


@pytest.mark.parametrize("size", [1e4, 8e4])
def test_extreme_lses(size: float) -> None:
    x, y = normal(16), normal(16, seed=1)
    for top in (size, -size):
        out, lse = merged((x, torch.tensor(top)), (y, torch.tensor(top)))
        close(out, (x.double() + y) / 2, atol=4 * ULP)
        close(lse, top + math.log(2), atol=size * ULP)
    out, lse = merged((x, torch.tensor(-size)), (y, torch.tensor(size)))
    assert torch.equal(out, y) and lse == size
    # A part that weighs nothing in float32 adds nothing, even if its out is not a number.
    assert torch.equal(merged((x * math.nan, torch.tensor(-size)), (y, torch.tensor(size)))[0], y)


def test_order_of_parts_changes_a_few_ulp_at_most() -> None:
    outs, lses = normal(4, 3, 16), normal(4, 3, seed=1)
    lses[2] = -INF
    results = [merge_states(outs[list(order)], lses[list(order)]) for order in permutations(range(4))]
    for out, lse in results:
        close(out, results[0][0].double(), atol=8 * ULP)
        close(lse, results[0][1].double(), atol=8 * ULP)


# ---- parts of one attention --------------------------------------------------------------------------------

CAPACITY = 96
Q, K, V = normal(2, 4, 32), normal(2, CAPACITY, 2, 32), normal(2, CAPACITY, 2, 16)


@settings(max_examples=40)
@given(
    cuts=st.lists(st.integers(0, CAPACITY), max_size=5),
    lengths=st.lists(st.integers(0, CAPACITY), min_size=2, max_size=2),
    softcap=st.sampled_from([None, 3.0]),
    policy=st.sampled_from(["auto", "off", "pinned(5)"]),
)
def test_parts_over_disjoint_keys_make_the_whole(
    cuts: list[int], lengths: list[int], softcap: float | None, policy: str
) -> None:
    """Cuts fall anywhere, twice in one place too, and past the rows' ends, where parts are empty."""
    parts = []
    for begin, end in pairwise([0, *sorted(cuts), CAPACITY]):
        inside = torch.tensor([min(max(length - begin, 0), end - begin) for length in lengths], dtype=torch.int32)
        parts.append(
            decode_attention(
                Q, K[:, begin:end], V[:, begin:end], inside, softcap=softcap, policy=policy, return_lse=True
            )
        )
    out, lse = merged(*parts)
    expected = reference_attention(Q, K, V, torch.tensor(lengths), softcap=softcap, return_lse=True)
    close(out, expected[0], atol=1e-5)
    close(lse, expected[1], atol=1e-5)
    for row in (row for row in range(2) if lengths[row] == 0):
        assert not out[row].any() and (lse[row] == -INF).all()


@settings(max_examples=40)
@given(
    parts=st.integers(1, 6),
    lses=st.lists(st.sampled_from([-INF, -300.0, -1.0, 0.0, 2.5, 80.0]), min_size=6, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    empties_hold=st.sampled_from([0.0, math.nan, INF]),
)
def test_equals_the_float64_merge(parts: int, lses: list[float], dtype: torch.dtype, empties_hold: float) -> None:
    logs = torch.tensor(lses[:parts])[:, None].expand(parts, 3)
    outs = normal(parts, 3, 16).to(dtype).masked_fill((logs == -INF)[..., None], empties_hold)
    out, lse = merge_states(outs, logs)
    expected = merge_states_reference(outs, logs)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert out.shape == (3, 16) and lse.shape == (3,)
    rounding = torch.finfo(dtype).eps if dtype != torch.float64 else ULP
    close(out, expected[0], atol=4 * max(rounding, ULP))
    close(lse, expected[1], atol=1e-5)


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 4))
def test_merging_in_two_steps_equals_merging_at_once(first: int, second: int) -> None:
    outs, lses = normal(first + second, 2, 16), normal(first + second, 2, seed=1)
    left, right = merge_states(outs[:first], lses[:first]), merge_states(outs[first:], lses[first:])
    for actual, expected in zip(merged(left, right), merge_states(outs, lses), strict=True):
        close(actual, expected.double(), atol=8 * ULP)


def test_q_len_parts_and_sinks_counted_once() -> None:
    """A sink belongs to one part only: given to both it would count twice."""
    q, sinks, keys = normal(2, 3, 4, 32), normal(4), 70
    call: dict[str, Any] = {"policy": "auto", "return_lse": True}
    starts = torch.full((2,), 40, dtype=torch.int32)
    late = decode_attention(q, K, V, keys, starts=starts, sinks=sinks, **call)  # keys from 40 on, causal
    early = decode_attention(q, K, V, 40 + 2, mask=torch.arange(CAPACITY) < 40, **call)  # keys below 40, to all
    out, lse = merged(early, late)
    expected = reference_attention(q, K, V, keys, sinks=sinks, return_lse=True)
    close(out, expected[0], atol=1e-5)
    close(lse, expected[1], atol=1e-5)


# ---- what it takes -----------------------------------------------------------------------------------------


def test_inputs_are_left_alone_and_may_have_any_strides() -> None:
    outs, lses = normal(16, 3, 4).permute(2, 1, 0), normal(3, 4).T
    copies = outs.clone(), lses.clone()
    strided, contiguous = merge_states(outs, lses), merge_states(outs.contiguous(), lses.contiguous())
    assert torch.equal(outs, copies[0]) and torch.equal(lses, copies[1])
    close(strided[0], contiguous[0].double(), atol=4 * ULP)


def test_compiles() -> None:
    outs, lses = normal(3, 2, 16), torch.tensor([[0.0, -INF], [1.0, -INF], [-INF, -INF]])
    expected = merge_states(outs, lses)
    actual = torch.compile(merge_states, fullgraph=True, backend="aot_eager")(outs, lses)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(
    ("outs", "lses", "error", "words"),
    [
        ([1.0], torch.zeros(1), TypeError, "outs, lses: .*tensors.*list.*Tensor"),
        (torch.zeros(2, 3, 16), None, TypeError, "outs, lses: .*tensors.*Tensor.*NoneType"),
        (torch.zeros(2, 3, 16, dtype=torch.int32), torch.zeros(2, 3), TypeError, "outs, lses: .*floating.*int32"),
        (torch.zeros(2, 3, 16), torch.zeros(2, 3, dtype=torch.float16), TypeError, "lses: .*float32.*float16"),
        (torch.zeros(2, 3, 16), torch.zeros(2, 3, dtype=torch.int64), TypeError, "lses: .*float32.*int64"),
        (torch.zeros(2, 3, 16), torch.zeros(2, 4), ValueError, r"lses: .*\(2, 3, 16\) without .*\(2, 4\)"),
        (torch.zeros(2, 3, 16), torch.zeros(3), ValueError, r"lses: .*\(2, 3, 16\) without .*\(3,\)"),
        (torch.zeros(2, 3, 16), torch.zeros(2, 3, 16), ValueError, r"lses: .*without .*\(2, 3, 16\)"),
        (torch.zeros(16), torch.zeros(()), ValueError, r"outs: .*\[parts, ..., v_head_dim\].*\(16,\)"),
        (torch.zeros(0, 3, 16), torch.zeros(0, 3), ValueError, r"outs: .*at least 1 part.*\(0, 3, 16\)"),
        (torch.zeros(2, 3, 16), torch.zeros(2, 3, device="meta"), ValueError, "outs on cpu, lses on meta"),
    ],
)
def test_bad_input_is_refused_by_name(outs: Any, lses: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        merge_states(outs, lses)
    assert type(caught.value) is error
