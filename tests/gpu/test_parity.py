"""On the GPU against float64: lengths, heads, dtypes, layouts, policies, and what must not be touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import exact, relative
from helpers import Guarded, assert_parity, assert_same, int32, make_inputs, page_order, poison_tails, to_pages

from splitkv import DecodeAttention, DecodeProblem, SplitPolicy, decode_attention, reference_attention
from splitkv.checks import DTYPE_NAMES

LENGTHS = [1, 5, 37, 64, 65, 520, 4096, 4097, 8192]
HEADS = [(8, 2), (16, 4), (24, 4)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = torch.float8_e4m3fn


def run(*tensors: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return decode_attention(*tensors, return_lse=True, **options)  # type: ignore[arg-type, return-value]


def assert_as_good_as_plain(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: list[int]
) -> None:
    """At most twice the error of plain PyTorch in q's dtype, plus one rounding of the output."""
    ref, _ = exact(q, k, v, lens)
    plain = relative(exact(q, k, v, lens, dtype=q.dtype)[0], ref)
    rounding = relative(ref.to(q.dtype), ref)
    assert relative(out, ref) <= 2 * plain + rounding


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_grid(heads: tuple[int, int], dtype: torch.dtype, layout: str) -> None:
    q, k, v = make_inputs(len(LENGTHS), *heads, 256, max(LENGTHS), dtype=dtype, device="cuda")
    want = exact(q, k, v, LENGTHS)
    options = {}
    keys, values = k, v
    if layout == "paged":
        table, pages = page_order(len(LENGTHS), max(LENGTHS), 16)
        keys, values = (to_pages_fast(cache, table, pages, 16) for cache in (k, v))
        options["block_table"] = table.cuda()
    for lens in (int32(LENGTHS, "cuda"), torch.tensor(LENGTHS, device="cuda")):
        got = run(q, keys, values, lens, **options)
        assert_parity(got, want)
        assert_as_good_as_plain(got[0], q, k, v, LENGTHS)
    for row, length in enumerate(LENGTHS):  # alone, as batch 1 has another schedule
        if layout == "contiguous":
            alone = run(q[row : row + 1], k[row : row + 1], v[row : row + 1], length)
            assert_same(alone, (got[0][row : row + 1], got[1][row : row + 1]), length)
    if layout == "contiguous":
        assert_parity(run(q, k, v, lens, backend="rowwise"), want)


def to_pages_fast(cache: torch.Tensor, table: torch.Tensor, pages: int, page_size: int) -> torch.Tensor:
    """helpers.to_pages for lengths that fill whole pages: one indexed write."""
    heads, dim = cache.shape[2:]
    pool = torch.full((pages, page_size, heads, dim), torch.nan, device=cache.device).to(cache.dtype)
    pool[table.flatten().long().to(cache.device)] = cache.reshape(-1, page_size, heads, dim)
    return pool


@pytest.mark.parametrize("heads", [(16, 4), (32, 8)], ids=str)
def test_fp8_keys_are_read_as_stored(heads: tuple[int, int]) -> None:
    lens = [1, 37, 4097, 20_000]
    q, k, v = make_inputs(4, *heads, 256, max(lens), dtype=torch.bfloat16, kv_dtype=FP8, device="cuda")
    scaled = exact(q, k.float() * 0.25, v.float() * 0.5, lens)
    got = run(q, k, v, int32(lens, "cuda"), k_scale=0.25, v_scale=0.5)
    assert_parity(got, scaled, tolerance=1e-2, lse_tolerance=1e-3)
    assert relative(got[0], scaled[0]) < 3e-3
    per_head = torch.tensor([0.25, 0.5] * (heads[1] // 2), device="cuda")
    want = exact(q, k.float() * per_head[:, None], v.float() * per_head[:, None], lens)
    got = run(q, k, v, int32(lens, "cuda"), k_scale=per_head, v_scale=per_head)
    assert_parity(got, want, tolerance=1e-2, lse_tolerance=1e-3)


def test_e5m2_keys() -> None:
    q, k, v = make_inputs(2, 8, 2, 128, 3000, dtype=torch.bfloat16, kv_dtype=torch.float8_e5m2, device="cuda")
    got, want = run(q, k, v, int32([3000, 77], "cuda")), exact(q, k, v, [3000, 77])
    assert_parity(got, want, lse_tolerance=1e-4)
    assert relative(got[0], want[0]) < 3e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_longest_context(dtype: torch.dtype) -> None:
    q, k, v = make_inputs(1, 16, 4, 256, 262_144, dtype=dtype, device="cuda")
    want = exact(q, k, v, [262_144])
    got = run(q, k, v, 262_144)
    assert_parity(got, want, lse_tolerance=1e-4)
    assert_as_good_as_plain(got[0], q, k, v, [262_144])


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 6, 7, 8, 12, 16, 32, 64])
def test_ratios_pair_heads_rightly(ratio: int) -> None:
    q, k, v = make_inputs(1, 2 * ratio, 2, 128, 300, dtype=torch.bfloat16, device="cuda")
    assert_parity(run(q, k, v, 300, policy="5"), exact(q, k, v, [300]))
    v[:] = torch.arange(1, 3, device="cuda", dtype=v.dtype)[None, None, :, None]
    for policy in ("auto", "5"):
        out, _ = run(q, k, v, 300, policy=policy)
        expected = (torch.arange(2 * ratio, device="cuda") // ratio + 1).to(out)
        assert torch.equal(out, expected[None, :, None].expand_as(out))


@pytest.mark.parametrize("dims", [(16, 16), (48, 80), (64, 64), (112, 112), (192, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_sizes(dims: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v = make_inputs(2, 8, 4, dims[0], 1000, v_head_dim=dims[1], dtype=dtype, device="cuda")
    got = run(q, k, v, int32([1000, 77], "cuda"))
    assert_parity(got, exact(q, k, v, [1000, 77]))


@pytest.mark.parametrize("policy", [SplitPolicy.length(68, 3), SplitPolicy.length(29, 7), SplitPolicy.pinned(30)])
def test_tiny_splits(policy: SplitPolicy) -> None:
    q, k, v = make_inputs(1, 16, 4, 256, 203, device="cuda")
    assert_parity(run(q, k, v, 203, policy=policy), exact(q, k, v, [203]))


@pytest.mark.parametrize("num_splits", [128, 129, 256])
def test_the_widest_merges(num_splits: int) -> None:
    """CASE-25: a reduction 128 wide of values 128 wide, which one Triton release compiled wrongly."""
    q, k, v = make_inputs(1, 16, 2, 128, 20_548, dtype=torch.bfloat16, device="cuda")
    assert_parity(run(q, k, v, 20_548, policy=SplitPolicy.pinned(num_splits)), exact(q, k, v, [20_548]))


OPTIONS = ("none", "window, softcap, sinks", "starts, bool mask", "additive mask", "scales per head")


def options_of(name: str) -> dict[str, Any]:
    """For 3 rows, 8 query heads, 2 KV heads, 4 queries and 700 keys; tensors on the CPU."""
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(8, 1, 700, generator=generator).to(torch.bfloat16)
    bias[0, :, 5:600] = -torch.inf
    sets: dict[str, dict[str, Any]] = {
        "none": {},
        "window, softcap, sinks": dict(window=100, softcap=20.0, sinks=torch.linspace(-2, 5, 8)),
        "starts, bool mask": dict(starts=int32([3, 0, 200]), mask=torch.rand(3, 1, 4, 700, generator=generator) > 0.5),
        "additive mask": dict(mask=bias),
        "scales per head": dict(k_scale=torch.tensor([0.5, 2.0]), v_scale=torch.tensor([1.0, 0.25])),
    }
    return sets[name]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("cuda", torch.bfloat16),
        *((name, dtype) for name in ("triton", "rowwise") for dtype in (torch.float32, torch.bfloat16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, dtype: torch.dtype, backend: str) -> None:
    """Four causal queries a row, one row too short for them; tests/interpreter has the options one by one."""
    q, k, v = make_inputs(3, 8, 2, 64, 700, q_len=4, dtype=dtype, device="cuda")
    lens, options = int32([700, 2, 333], "cuda"), options_of(name)
    on_gpu = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    want = reference_attention(q, k, v, lens, return_lse=True, **options)
    assert_parity(run(q, k, v, lens, backend=backend, **on_gpu), want)  # type: ignore[arg-type]


def test_policies_agree() -> None:
    q, k, v = make_inputs(2, 16, 4, 256, 20_000, dtype=torch.bfloat16, device="cuda")
    lens = int32([20_000, 4_847], "cuda")
    auto = run(q, k, v, lens)[0].double()
    for policy in ("waves", "capacity", "length", "legacy", "off", "11"):
        other = run(q, k, v, lens, policy=policy)[0].double()
        assert relative(other, auto) <= 2e-3, policy
        assert torch.cosine_similarity(other.flatten(), auto.flatten(), 0) >= 0.99999, policy


def test_half_keys_under_an_f32_query_are_widened() -> None:
    q, k, v = make_inputs(1, 16, 4, 256, 5000, kv_dtype=torch.float16, device="cuda")
    got = run(q, k, v, 5000)
    wide = run(q, k.float(), v.float(), 5000)
    assert (got[0] - wide[0]).abs().max() <= 1e-4
    assert_parity(got, exact(q, k, v, [5000]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_nothing_but_valid_keys_matters_and_nothing_else_is_written(dtype: torch.dtype) -> None:
    lens = [20_000, 0, 1, 129, 4_096, 19_999, 3, 70]
    q_dtype = torch.bfloat16 if dtype == FP8 else dtype
    q, k, v = make_inputs(8, 16, 4, 256, 20_480, dtype=q_dtype, kv_dtype=dtype, device="cuda")
    problem = DecodeProblem(8, 16, 4, 256, capacity=20_480, q_dtype=DTYPE_NAMES[q_dtype], kv_dtype=DTYPE_NAMES[dtype])
    needed = DecodeAttention(problem).plan.workspace_bytes
    want = None
    for fill in (0.0, torch.nan, torch.inf, 6e4):
        if dtype == FP8 and fill in (torch.inf, 6e4):
            continue
        keys, values = (poison_tails(cache, lens, fill) for cache in (k, v))
        workspace = Guarded((needed,), torch.uint8, "cuda", byte=0xFF if fill else 0)
        out = Guarded(tuple(q.shape), q_dtype, "cuda")
        result, lse = run(q, keys, values, int32(lens, "cuda"), out=out.tensor, workspace=workspace.tensor)
        assert out.intact() and workspace.intact()
        want = want or (result.clone(), lse)
        assert_same((result, lse), want, fill)
    assert want is not None and torch.isfinite(want[0]).all()
    assert not want[0][1].any() and bool((want[1][1] == -torch.inf).all())


def test_a_row_of_one_split_leaves_the_workspace_alone() -> None:
    q, k, v = make_inputs(2, 16, 4, 256, 8192, dtype=torch.bfloat16, device="cuda")
    problem = DecodeProblem(2, 16, 4, 256, capacity=8192)
    workspace = Guarded((DecodeAttention(problem).plan.workspace_bytes,), torch.uint8, "cuda")
    short = run(q, k, v, int32([128, 5], "cuda"), workspace=workspace.tensor)
    assert workspace.untouched()
    assert_same(short, run(q, k, v, int32([128, 5], "cuda"), policy="off"))
    short = run(q, k, v, int32([128, 5], "cuda"), backend="triton")
    assert_same(short, run(q, k, v, int32([128, 5], "cuda"), backend="rowwise"))


def test_hostile_lengths_and_pages_never_leave_the_cache() -> None:
    q, k, v = make_inputs(4, 8, 2, 64, 128, dtype=torch.bfloat16, device="cuda")
    table, pages = page_order(4, 128, 16)
    keys, values = (to_pages(cache, table, pages, 16) for cache in (k, v))
    bad = table.clone()
    bad[0, 2], bad[1, 0], bad[2, 7] = -1, pages, 2**30
    got = run(q, keys, values, int32([128, 16, 200, -5], "cuda"), block_table=bad.cuda())
    assert torch.isfinite(got[0]).all()
    assert not got[0][1].any() and not got[0][3].any()
    kept = torch.cat([k[0, :32], k[0, 48:]]), torch.cat([v[0, :32], v[0, 48:]])
    assert_parity((got[0][:1], got[1][:1]), exact(q[:1], kept[0][None], kept[1][None], [112]))
    torch.cuda.synchronize()
