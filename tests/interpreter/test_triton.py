"""Backends "triton" and "rowwise" against float64: geometry, layouts, options, poison, and mutants that must show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from helpers import (
    INF,
    NAN,
    Guarded,
    assert_parity,
    assert_same,
    int32,
    launch_plan,
    make_inputs,
    page_order,
    poison_tails,
    reschedule,
    to_pages,
    with_small_splits,
)

from splitkv import DecodeProblem, DeviceSpec, SplitPolicy, decode_attention, plan_decode, reference_attention
from splitkv.backends import triton_launch, triton_merge, triton_split
from splitkv.reference import twin_attention

F32, F16 = torch.float32, torch.float16
BACKENDS = ("triton", "rowwise")
NAMES = {F32: "f32", F16: "f16"}
both_dtypes = pytest.mark.parametrize("dtype", [F32, F16], ids=NAMES.get)
both_backends = pytest.mark.parametrize("backend", BACKENDS)


def attend(*tensors: Any, backend: str = "triton", **options: Any) -> tuple[Tensor, Tensor]:
    return decode_attention(*tensors, return_lse=True, backend=backend, **options)  # type: ignore[return-value]


def oracle(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return reference_attention(*tensors, return_lse=True, **options)  # type: ignore[return-value]


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lens: Tensor | int,
    *,
    backend: str = "triton",
    policy: Any = "auto",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Run, compare with float64, return the result."""
    got = attend(q, k, v, lens, backend=backend, policy=policy, **options)
    assert_parity(got, oracle(q, k, v, lens, **options))
    return got


# ---- geometry ----------------------------------------------------------------------------------------------


@both_backends
@both_dtypes
@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 6, 7, 8, 16])
def test_every_head_reads_its_own_kv_head(ratio: int, dtype: torch.dtype, backend: str) -> None:
    """CASE-05: V of KV head j is the constant j + 1, so out of query head h is h // ratio + 1 whatever the weights."""
    q, k, v = make_inputs(1, 2 * ratio, 2, 16, 40, dtype=dtype)
    lens = int32([37])
    check(q, k, v, lens, backend=backend, policy=SplitPolicy.pinned(3))
    v[:, :, 0], v[:, :, 1] = 1, 2
    table, pages = page_order(1, 40, 16)
    pools = to_pages(k, table, pages, 16), to_pages(v, table, pages, 16)
    results = [attend(q, *pools, lens, policy=SplitPolicy.pinned(5), backend=backend, block_table=table)]
    if backend == "triton":
        results.append(attend(q, k, v, lens, policy=SplitPolicy.pinned(1)))
    expected = (torch.arange(2 * ratio) // ratio + 1.0)[None, :, None].expand(1, -1, 16)
    for out, _ in results:
        torch.testing.assert_close(out.float(), expected, rtol=5e-7 if dtype == F32 else 1e-3, atol=0)


@both_backends
@both_dtypes
@pytest.mark.parametrize(
    "dims", [(16, 16), (32, 32), (48, 48), (64, 64), (80, 80), (112, 112), (128, 64), (192, 128), (256, 256), (16, 80)]
)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    q, k, v = make_inputs(1, 2, 1, dims[0], 41, v_head_dim=dims[1], dtype=dtype)
    check(q, k, v, int32([40]), backend=backend, policy=SplitPolicy.pinned(2))


@both_dtypes
@pytest.mark.parametrize(
    "policy", ["auto", "waves", "capacity", "length", "legacy", *map(SplitPolicy.pinned, (1, 3, 7, 30))], ids=str
)
def test_policies(policy: str | SplitPolicy, dtype: torch.dtype) -> None:
    """203 keys: pinned 3, 7 and 30 give splits of 68, 29 and 7 keys, none a multiple of a tile."""
    q, k, v = make_inputs(2, 4, 2, 16, 203, dtype=dtype)
    got = check(q, k, v, int32([203, 155]), policy=policy)
    assert_parity(got, check(q, k, v, int32([203, 155]), backend="rowwise"))
    if dtype == F32:
        problem = DecodeProblem(2, 4, 2, 16, capacity=203, q_dtype="f32", kv_dtype="f32")
        plan = plan_decode(problem, DeviceSpec.cpu(), policy)
        split_len = [plan.rule.split(span)[0] for span in (203, 155)]
        for row, length in enumerate((203, 155)):
            one = slice(row, row + 1)
            twin = twin_attention(
                q[one], k[one], v[one], length, split_len=split_len[row], block_n=plan.tile.block_n, return_lse=True
            )
            assert_parity((got[0][one], got[1][one]), twin)  # type: ignore[arg-type]


@pytest.mark.parametrize("heads, q_len", [(16, 5), (5, 3)])
def test_groups_wider_than_one_block(heads: int, q_len: int) -> None:
    """80 query vectors of one KV head are two blocks of 64 in f16 and ten of 8 in f32."""
    for dtype in (F32, F16):
        q, k, v = make_inputs(1, heads, 1, 16, 20, q_len=q_len, dtype=dtype)
        check(q, k, v, int32([19]), policy=SplitPolicy.pinned(2))


def test_unpacked_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPLITKV_GQA_PACK=0 gives every query head a block of its own, and the same answer to rounding."""
    q, k, v = make_inputs(2, 6, 2, 16, 70)
    packed = check(q, k, v, int32([70, 33]), policy=SplitPolicy.pinned(3))
    monkeypatch.setenv("SPLITKV_GQA_PACK", "0")
    assert_parity(check(q, k, v, int32([70, 33]), policy=SplitPolicy.pinned(3)), packed)


@both_backends
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5])
def test_causal_queries(q_len: int, backend: str) -> None:
    """Query i sees keys below seq_len - q_len + 1 + i; a row shorter than q_len has queries that see none."""
    for dtype in (F32, F16):
        q, k, v = make_inputs(3, 2, 1, 16, 50, q_len=q_len, dtype=dtype)
        check(q, k, v, int32([45, 2, 31]), backend=backend, policy=SplitPolicy.pinned(3))
        check(q, k, v, int32([45, 2, 31]), backend=backend, policy=SplitPolicy.pinned(3), window=9)


# ---- lengths -----------------------------------------------------------------------------------------------


@both_backends
@both_dtypes
def test_lengths_per_row(dtype: torch.dtype, backend: str) -> None:
    lens = [0, 1, 64, 69, -3, 17, 2**30]
    q, k, v = make_inputs(len(lens), 2, 1, 16, 64, dtype=dtype)
    kept = [min(max(length, 0), 64) for length in lens]
    k, v = poison_tails(k, kept, NAN), poison_tails(v, kept, NAN)
    for policy in (SplitPolicy.pinned(1), SplitPolicy.pinned(3)):
        got = check(q, k, v, int32(lens), backend=backend, policy=policy)
        assert (got[0][[0, 4]] == 0).all() and (got[1][[0, 4]] == -INF).all()
        assert_same(attend(q, k, v, torch.tensor(lens), backend=backend, policy=policy), got, "int64 lens")
    assert_same(
        attend(q, k, v, torch.tensor([2**40, -(2**40), *lens[2:]]), backend=backend)[:1] * 2,
        attend(q, k, v, int32([64, 0, *lens[2:]]), backend=backend)[:1] * 2,
        "int64 lens beyond int32",
    )


@both_backends
def test_one_length_for_all(backend: str) -> None:
    q, k, v = make_inputs(2, 2, 1, 16, 40)
    for length in (0, 1, 33, 40):
        got = check(q, k, v, length, backend=backend, policy=SplitPolicy.pinned(2))
        assert_same(attend(q, k, v, int32([length] * 2), backend=backend, policy=SplitPolicy.pinned(2)), got, length)


# ---- layouts -----------------------------------------------------------------------------------------------


def layouts(k: Tensor, v: Tensor, poison: float) -> dict[str, tuple[Tensor, Tensor]]:
    """CASE-04: K and V as views of larger pools, with `poison` in every element that is not theirs."""

    def pool(*shape: int) -> Tensor:
        return torch.full(shape, poison).to(k.dtype)

    n, p, h, d = k.shape
    pair, halves, layers = pool(n, 2, p, h, d), pool(2, n, p, h, d), pool(n, 6, 2, p, h, d)
    hnd_k, hnd_v = pool(n, h, p, d).transpose(1, 2), pool(n, h, p, d).transpose(1, 2)
    gap, shift = (16, 16) if k.dtype == F32 else (5, 3)  # f32 kernels refuse what is not read in whole vectors
    wide = pool(n, p + 3, h + 1, d + gap)
    views = {
        "interleaved per page": pair.unbind(1),
        "halves": (halves[0], halves[1]),
        "one layer of six": (layers[:, 3, 0], layers[:, 3, 1]),
        "heads before tokens": (hnd_k, hnd_v),
        "K and V differ": (wide[:, 2 : p + 2, :h, shift : d + shift], pool(n, h, p, d).transpose(1, 2)),
    }
    for k_view, v_view in views.values():
        k_view.copy_(k)
        v_view.copy_(v)
    return views


@both_backends
@both_dtypes
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_strided_caches_are_bit_identical(paged: bool, dtype: torch.dtype, backend: str) -> None:
    lens = int32([5, 48, 61])
    q, k, v = make_inputs(3, 2, 2, 16, 64, dtype=dtype)
    options: dict[str, Any] = dict(backend=backend, policy=SplitPolicy.pinned(3))
    dense = check(q, k, v, lens, **options)
    if paged:
        table, pages = page_order(3, 64, 16)
        k, v = (to_pages(cache, table, pages, 16) for cache in (k, v))
        options["block_table"] = table
    for name, (k_view, v_view) in layouts(k, v, NAN).items():
        assert_same(attend(q, k_view, v_view, lens, **options), dense, name)


@both_backends
def test_q_and_out_are_strided_views(backend: str) -> None:
    """q cut from a fused projection, out into a wider buffer; nothing beside out is written."""
    for q_len in (None, 2):
        q, k, v = make_inputs(2, 4, 2, 16, 40, q_len=q_len)
        lens = int32([40, 23])
        want = check(q, k, v, lens, backend=backend, policy=SplitPolicy.pinned(2))
        fused = torch.full((*q.shape[:-2], 4 + 2 + 2, 21), NAN)
        fused[..., 1:5, 2:18] = q
        wide = torch.full((*q.shape[:-2], 7, 19), -7.0)
        out = wide[..., 2:6, 1:17]
        got = attend(fused[..., 1:5, 2:18], k, v, lens, backend=backend, policy=SplitPolicy.pinned(2), out=out)
        assert got[0] is out
        assert_same(got, want)
        out.fill_(-7.0)
        assert (wide == -7.0).all()


@both_backends
@both_dtypes
@pytest.mark.parametrize("page_size", [1, 16, 64, 100, 784])
def test_pages_are_bit_identical_to_contiguous(page_size: int, dtype: torch.dtype, backend: str) -> None:
    lens = [300, 0, 129]
    q, k, v = make_inputs(3, 2, 1, 16, 300, dtype=dtype)
    want = check(q, k, v, int32(lens), backend=backend)
    table, pages = page_order(3, 300, page_size, seed=page_size)
    poisoned = [poison_tails(cache, lens, NAN) for cache in (k, v)]
    k, v = (to_pages(cache, table, pages, page_size) for cache in poisoned)
    assert_same(attend(q, k, v, int32(lens), block_table=table, backend=backend), want)
    bad = int32([-1, pages, 2**31 - 1, -(2**31)])  # what no row needs is never read (CASE-15)
    wider = torch.cat([table, bad.expand(3, 4)], 1)
    for row, length in enumerate(lens):
        wider[row, -(-length // page_size) :] = bad[row]
    assert_same(attend(q, k, v, int32(lens), block_table=wider, backend=backend), want, "wider table")


@both_backends
def test_keys_on_pages_that_do_not_exist_are_absent(backend: str) -> None:
    lens = int32([60, 60, 60, 60])
    q, k, v = make_inputs(4, 2, 1, 16, 64)
    table, pages = page_order(4, 64, 16)
    k, v = (to_pages(cache, table, pages, 16) for cache in (k, v))
    table[0, 1], table[1, 0], table[1, 3], table[2] = -1, pages, 2**31 - 1, -(2**31)
    for policy in (SplitPolicy.pinned(1), SplitPolicy.pinned(4)):
        out, lse = check(q, k, v, lens, block_table=table, backend=backend, policy=policy)
        assert (out[2] == 0).all() and (lse[2] == -INF).all()


@both_backends
@pytest.mark.parametrize("layout", ["tokens", "heads", "pages"])
def test_offsets_beyond_32_bits(layout: str, backend: str, check_overflow: None) -> None:
    """CASE-01: caches that reach past 2**31 elements by the stride of one dimension (4 GiB, all but untouched)."""
    q, k, v = make_inputs(1, 3, 3, 16, 5, dtype=F16)
    want = attend(q, k, v, int32([5]), policy=SplitPolicy.pinned(2), backend=backend)
    strides = {"tokens": (0, 2**29 + 64, 16, 1), "heads": (0, 16, 2**30 + 64, 1), "pages": (2**29 + 64, 48, 16, 1)}
    options = dict(block_table=int32([[2, 4, 0, 1, 3]])) if layout == "pages" else {}
    views = []
    for cache in (k, v):
        if layout == "pages":
            cache = to_pages(cache, options["block_table"], 5, 1)
        memory = torch.empty(2**31 + 2**20, dtype=F16)
        views.append(memory.as_strided(cache.shape, strides[layout]).copy_(cache))
    assert_same(attend(q, *views, int32([5]), policy=SplitPolicy.pinned(2), backend=backend, **options), want)


# ---- poison and guard bands --------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("options", [{}, dict(window=20), dict(starts=[3, 0, 30])], ids=str)
def test_bytes_outside_the_valid_keys_change_nothing(options: dict[str, Any], dtype: torch.dtype) -> None:
    lens = [61, 1, 40]
    q, k, v = make_inputs(3, 2, 1, 16, 64, dtype=dtype)
    first = options.get("starts", [max(length - options.get("window", 64), 0) for length in lens])
    if "starts" in options:
        options = dict(starts=int32(options["starts"]))
    problem = DecodeProblem(3, 2, 1, 16, capacity=64, q_dtype=NAMES[dtype], kv_dtype=NAMES[dtype])
    plan = plan_decode(problem, DeviceSpec.cpu(), SplitPolicy.pinned(4))
    want = oracle(q, k, v, int32(lens), **options)
    for backend in BACKENDS:
        results = []
        for fill, byte in ((0.0, 0), (NAN, 0xFF), (INF, 0x7F), (6e4, 0x55)):
            poisoned = [poison_tails(cache, lens, fill) for cache in (k, v)]
            for cache in poisoned:
                for row, start in enumerate(first):
                    cache[row, :start] = fill
            out, lse = Guarded(q.shape, dtype, byte=byte), Guarded(q.shape[:2], F32, byte=byte)
            workspace = Guarded((plan.workspace_bytes,), torch.uint8, byte=byte)
            buffers: dict[str, Any] = dict(out=out.tensor, lse=lse.tensor, workspace=workspace.tensor, backend=backend)
            results.append(launch_plan(plan, q, *poisoned, int32(lens), **buffers, **options))
            assert out.intact() and lse.intact() and workspace.intact()
            assert workspace.untouched() == (backend == "rowwise")
        assert_parity(results[0], want)
        for result in results[1:]:
            assert_same(result, results[0], backend)


# ---- options -----------------------------------------------------------------------------------------------


def option_sets() -> dict[str, dict[str, Any]]:
    """Options for 3 rows, 4 query heads, 2 KV heads, 2 queries and 48 keys."""
    generator = torch.Generator().manual_seed(5)
    tree = torch.rand(3, 1, 2, 48, generator=generator) > 0.4
    tree[1, :, 0] = False  # one query that sees nothing
    bias = torch.randn(4, 2, 48, generator=generator)
    bias[0, 1, 5:40] = -INF
    one_key = bias.masked_fill(torch.rand(bias.shape, generator=generator) > 0.3, -INF)
    return {
        "window 1": dict(window=1),
        "window 16": dict(window=16),
        "window over the length": dict(window=49),
        "scale": dict(softmax_scale=0.9),
        "softcap": dict(softcap=2.5),
        "small softcap": dict(softcap=0.05, softmax_scale=3.0),
        "sinks": dict(sinks=torch.tensor([0.5, -1.0, 30.0, -INF])),
        "sinks and softcap": dict(sinks=torch.tensor([0.5, -1.0, 30.0, -INF]), softcap=1.0, window=12),
        "starts": dict(starts=int32([3, 0, 40])),
        "starts beyond the length": dict(starts=int32([-5, 48, 2**30])),
        "starts and window": dict(starts=int32([30, 0, 7]), window=30),
        "bool mask": dict(mask=tree),
        "bool mask by key": dict(mask=torch.arange(48) % 3 != 0),
        "additive mask": dict(mask=bias),
        "additive mask with strides": dict(mask=bias.transpose(0, 2).contiguous().transpose(0, 2).half()),
        "mostly hidden": dict(mask=one_key, sinks=torch.zeros(4)),
        "float scales": dict(k_scale=0.25, v_scale=3.0),
        "0-d scales": dict(k_scale=torch.tensor(0.25), v_scale=torch.tensor(3.0)),
        "scales per head": dict(k_scale=torch.tensor([0.25, 2.0]), v_scale=torch.tensor([3.0, 0.5])),
        "strided scales": dict(k_scale=torch.tensor([0.25, NAN, 2.0, NAN])[::2], v_scale=-0.5),
    }


@pytest.mark.parametrize(
    "backend, dtype", [("triton", F32), ("triton", F16), ("rowwise", F32)], ids=["f32", "f16", "rowwise"]
)
@pytest.mark.parametrize("name", option_sets())
def test_options(name: str, backend: str, dtype: torch.dtype) -> None:
    options = option_sets()[name]
    q, k, v = make_inputs(3, 4, 2, 16, 48, q_len=2, dtype=dtype)
    lens = int32([48, 9, 41])
    scale = float(torch.as_tensor(options.get("v_scale", 1.0)).nan_to_num().abs().max())
    got = attend(q, k, v, lens, backend=backend, policy=SplitPolicy.pinned(2), **options)
    tolerance = max(scale, 1.0) * (1e-5 if dtype == F32 else 2e-3)
    assert_parity(got, oracle(q, k, v, lens, **options), tolerance=tolerance)


def test_scales_given_in_three_forms_are_one_answer() -> None:
    """CASE-03: lse moves with k_scale and not with v_scale; no scale is a scale of 1."""
    q, k, v = make_inputs(2, 4, 2, 16, 40)
    lens, policy = int32([40, 7]), SplitPolicy.pinned(2)
    plain = attend(q, k, v, lens, policy=policy)
    ones = torch.ones(2)
    assert_same(attend(q, k, v, lens, policy=policy, k_scale=ones, v_scale=ones), plain, "ones")
    assert_same(attend(q, k, v, lens, policy=policy, k_scale=1.0, v_scale=1.0), plain, "1.0")
    forms = (0.25, torch.tensor(0.25), torch.tensor([0.25, 0.25]))
    out, lse = attend(q, k, v, lens, policy=policy, v_scale=forms[0])
    assert torch.equal(lse, plain[1])
    torch.testing.assert_close(out, plain[0] * 0.25, rtol=0, atol=0)
    first, *others = (attend(q, k, v, lens, policy=policy, k_scale=form, v_scale=form) for form in forms)
    assert not torch.equal(first[1], lse)
    for other in others:
        assert_same(other, first)


# ---- mutants -----------------------------------------------------------------------------------------------


@triton.jit
def join_without_rescale(acc_a, m_a, l_a, acc_b, m_b, l_b):
    return acc_a + acc_b, tl.maximum(m_a, m_b), l_a + l_b


@triton.jit
def join_right_part_only(acc_a, m_a, l_a, acc_b, m_b, l_b):
    return acc_b, m_b, l_b


def break_argument(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Pass something else to the kernels as an argument; a function gets the right value and all arguments."""
    right = triton_launch.tile_arguments

    def wrong(**arguments: Any) -> dict[str, Any]:
        made = right(**arguments)
        return made | {name: change(made[name], made) for name, change in changes.items()}

    monkeypatch.setattr(triton_launch, "tile_arguments", wrong)


MUTANTS: dict[str, dict[str, Any]] = {
    "K's token stride is one head": dict(k_stride_t=lambda right, a: a["k_stride_h"]),
    "V's strides are K's": dict(
        v_stride_t=lambda right, a: a["k_stride_t"], v_stride_h=lambda right, a: a["k_stride_h"]
    ),
    "strides for elements of half the size": dict(k_stride_t=lambda right, a: right // 2),
    "every KV head reads the first": dict(v_stride_h=lambda right, a: 0),
    "every row reads the first": dict(k_stride_b=lambda right, a: 0),
    "K is one element late": dict(k_cache=lambda right, a: right.view(-1)[1:]),
    "one query head is zero": dict(q=lambda right, a: right.index_fill(2, torch.tensor([1]), 0.0)),
    "the scale is forgotten": dict(scale=lambda right, a: 1.0),
}


def mutant_check(schedule: str = "unloaded") -> None:
    """The parity check that the tests above use, on one small case with everything in it."""
    q, k, v = make_inputs(2, 6, 2, 16, 96, v_head_dim=32)
    k[:, 17] *= 8  # a maximum that moves between splits
    problem = DecodeProblem(2, 6, 2, 16, 32, capacity=96, q_dtype="f32", kv_dtype="f32")
    plan = plan_decode(problem, DeviceSpec.cpu(), SplitPolicy.pinned(6))
    if schedule == "loaded":
        plan = reschedule(with_small_splits(plan, 6), max_run=4, target_units=1)
    assert_parity(launch_plan(plan, q, k, v, int32([95, 40])), oracle(q, k, v, int32([95, 40])))


def test_the_mutant_check_passes_without_a_mutant() -> None:
    mutant_check()
    mutant_check("loaded")


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_arguments_turn_the_check_red(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_argument(monkeypatch, **MUTANTS[name])
    with pytest.raises(AssertionError, match="from float64"):
        mutant_check()


@pytest.mark.parametrize("mutant", [join_without_rescale, join_right_part_only], ids=["no rescale", "last part only"])
@pytest.mark.parametrize("module, schedule", [(triton_merge, "unloaded"), (triton_split, "loaded")])
def test_mutant_joins_turn_the_check_red(
    module: Any, schedule: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "join", mutant)
    with pytest.raises(AssertionError, match=r"float64|finite"):
        mutant_check(schedule)
