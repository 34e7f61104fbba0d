"""Plans of backend "cuda": which problems it takes, its tile, its shared memory and its schedule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_plan import CPU, H200, POLICIES, check_schedule, packing, problem, problems, ragged

from splitkv.plan import DecodePlan, plan_decode
from splitkv.policy import SplitPolicy
from splitkv.problem import KNOWN_DEVICES, DecodeProblem, DeviceSpec
from splitkv.tiles import TileConfig, compute_dtype, cuda_shared, cuda_tile, cuda_warp_keys, runs_on_cuda

GPUS = st.sampled_from(list(KNOWN_DEVICES.values()))
OLDER = replace(H200, name="older", capability=(7, 5), shared_memory_bytes=64 << 10)
BYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@st.composite
def taken(draw: st.DrawFn) -> tuple[DecodeProblem, int]:
    """A problem that backend cuda takes, at any head size, and the query vectors of a KV head."""
    dims = st.integers(1, 16).map(lambda n: 16 * n)
    asked = replace(
        draw(problems()),
        head_dim=draw(dims),
        v_head_dim=draw(dims),
        q_dtype=draw(st.sampled_from(["f16", "bf16"])),
        kv_dtype=draw(st.sampled_from(["f16", "bf16", "fp8_e4m3", "fp8_e5m2"])),
    )
    assume(compute_dtype(asked.q_dtype, asked.kv_dtype) != "f32")
    return asked, draw(st.integers(1, 8 if max(asked.head_dim, asked.v_head_dim) > 128 else 16))


def shared_bytes(asked: DecodeProblem, rows: int, device: DeviceSpec, stages: int) -> int:
    """sizeof(Shared) of cuda_shape.cuh, field by field: ring, q, ml, exists, free_stage, pages_ahead, kept."""

    def pitch(chunks: int) -> int:  # 16-byte chunks between two rows: no two rows of eight in the same banks
        return chunks | 1 if chunks % 8 else chunks

    keys, size = cuda_warp_keys(asked, device), BYTES[asked.kv_dtype]
    ring = 4 * stages * keys * 16 * max(pitch(dim * size // 16) for dim in (asked.head_dim, asked.v_head_dim))
    columns = 8 if rows <= 8 else 16
    q = columns // 8 * asked.head_dim // 16 * 32 * 8
    if asked.kv_dtype == "f32":  # no queries, but a tile's weights
        q = 4 * keys * next(vectors for vectors in (1, 2, 4, 8) if rows <= vectors) * 4
    threads = next(128 // vectors for vectors in (1, 2, 4, 8, 16) if rows <= vectors)  # of a query vector
    part = 4 * math.ceil(asked.v_head_dim / 4 / threads)  # words of each thread
    kept = part + 2 if part >= 16 else 0
    exists = 4 * stages * math.ceil(keys / 32) * 4
    pages_ahead = 0 if asked.page_size is None else 4 * stages * 4 * 4
    total = ring + q + 4 * columns * 8 + exists + 4 * 4 + pages_ahead + 128 * 4 * kept
    return (total + 15) // 16 * 16  # the ring's alignment


# ------------------------------------------------------------------------------------------- which backend


@given(problems(), GPUS, st.booleans())
def test_cuda_takes_what_the_geometry_and_the_architecture_allow(
    asked: DecodeProblem, device: DeviceSpec, pack: bool
) -> None:
    rows = asked.rows_per_kv_head if pack else asked.q_len
    dims = max(asked.head_dim, asked.v_head_dim)
    takes = (dims <= 128 and rows <= 16) or (dims <= 256 and rows <= 8)
    if compute_dtype(asked.q_dtype, asked.kv_dtype) == "f32":
        takes = asked.kv_dtype == "f32" and dims <= 256 and rows <= 8
    assert runs_on_cuda(asked, rows, device) == takes
    for refused in (OLDER, CPU):
        assert not runs_on_cuda(asked, rows, refused)
    with packing(pack):
        assert plan_decode(asked, device).backend == ("cuda" if takes else "triton")
        assert plan_decode(asked, device, backend="triton").backend == "triton"
        assert plan_decode(asked, CPU).backend == "cpu"
        if takes:
            assert plan_decode(asked, device, backend="cuda") == plan_decode(asked, device)
        else:
            with pytest.raises(ValueError, match="backend: cuda takes up to 16 query vectors"):
                plan_decode(asked, device, backend="cuda")


def test_the_device_decides_by_its_architecture_alone() -> None:
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (12, 1)):
        assert plan_decode(problem(), replace(OLDER, capability=capability)).backend == "cuda"
    assert plan_decode(problem(), OLDER).backend == "triton"


# ---------------------------------------------------------------------------------- tile and shared memory


@given(taken(), GPUS)
def test_shared_memory_holds_what_the_kernel_declares(asked: tuple[DecodeProblem, int], device: DeviceSpec) -> None:
    """CASE-22: never over what a block may use, in whole 16 bytes, with as many stages as leave room for two blocks."""
    geometry, rows = asked
    stages, size = cuda_shared(geometry, rows, device)
    assert 2 <= stages <= 6
    assert size == shared_bytes(geometry, rows, device, stages)
    assert size % 16 == 0
    assert size <= device.shared_memory_bytes
    half = (device.shared_memory_bytes + 1024) // 2 - 1024
    assert size <= half + 16 or stages == 2
    if stages < 6:
        assert shared_bytes(geometry, rows, device, stages + 1) > half


@given(taken(), GPUS, GPUS, POLICIES, st.integers(1, 500), st.integers(1, 1024), st.sampled_from([None, 1, 16, 784]))
def test_the_tile_follows_the_geometry_alone(
    asked: tuple[DecodeProblem, int],
    device: DeviceSpec,
    elsewhere: DeviceSpec,
    policy: SplitPolicy,
    sm_count: int,
    batch: int,
    page_size: int | None,
) -> None:
    geometry, rows = asked
    tile = cuda_tile(geometry, rows, device)
    other = replace(geometry, batch=batch, page_size=page_size, capacity=4096)

    def tile_there(there: DeviceSpec) -> TileConfig:
        return replace(cuda_tile(other, rows, there), num_stages=tile.num_stages)  # stages fix no byte

    assert tile_there(replace(device, sm_count=sm_count)) == tile
    if cuda_warp_keys(geometry, elsewhere) == cuda_warp_keys(geometry, device):
        assert tile_there(elsewhere) == tile
    else:  # the one tile that an architecture's shared memory decides
        assert geometry.kv_dtype.startswith("fp8") and max(geometry.head_dim, geometry.v_head_dim) == 128
        assert {tile.block_n, tile_there(elsewhere).block_n} == {128, 256}
    assert rows <= tile.block_m in (8, 16) and (rows > 8) == (tile.block_m == 16)
    assert tile.num_warps == 4 and tile.block_n in (64, 128, 256)
    if runs_on_cuda(other, other.rows_per_kv_head, device):
        planned = plan_decode(other, replace(device, sm_count=sm_count), policy).tile
        assert planned == cuda_tile(geometry, other.rows_per_kv_head, device)


@pytest.mark.parametrize(
    ("dims", "keys"), [((128, 128), 64), ((128, 64), 64), ((96, 128), 32), ((64, 64), 32), ((256, 128), 32)]
)
def test_wide_tiles_of_fp8_where_memory_holds_them(dims: tuple[int, int], keys: int) -> None:
    """Splits are whole tiles of the block, so that none of its warps is idle."""
    asked = replace(problem(), head_dim=dims[0], v_head_dim=dims[1], kv_dtype="fp8_e4m3")
    for name, wanted in (("h200", keys), ("b200", keys), ("a100", 32), ("rtx4090", 32)):
        device = DeviceSpec.named(name)
        rule = SplitPolicy.auto().rule(asked, device)
        assert cuda_warp_keys(asked, device) == wanted, name
        assert rule.quantum % (4 * wanted) == 0 and rule.min_len % rule.quantum == 0, name


# ------------------------------------------------------------------------------------------------ schedule


def plan_of(asked: tuple[DecodeProblem, int], device: DeviceSpec, policy: SplitPolicy, batch: int) -> DecodePlan:
    geometry = replace(asked[0], batch=batch, num_q_heads=asked[0].num_kv_heads * asked[1], q_len=1)
    return plan_decode(geometry, device, policy, backend="cuda")


@given(taken(), GPUS, POLICIES, st.integers(1, 1024))
def test_blocks_fill_the_device_twice_and_no_more(
    asked: tuple[DecodeProblem, int], device: DeviceSpec, policy: SplitPolicy, batch: int
) -> None:
    plan = plan_of(asked, device, policy, batch)
    heads, blocks, rest = plan.grid
    assert (heads, rest) == (plan.problem.num_kv_heads * plan.row_blocks, 1)
    at_once = plan.blocks_at_once
    assert 1 <= at_once <= plan.max_units
    assert heads * at_once <= max(plan.blocks_per_sm * device.sm_count, heads)
    if at_once < plan.max_units:
        assert heads * (at_once + 1) > plan.blocks_per_sm * device.sm_count
    assert blocks == at_once * (4 if plan.max_run > 1 and batch > 1 else 1)
    assert plan.blocks_per_sm == (1 if heads * batch * plan.max_splits <= device.sm_count else 2)


@given(taken(), GPUS, POLICIES, st.data())
def test_runs_and_units(
    asked: tuple[DecodeProblem, int], device: DeviceSpec, policy: SplitPolicy, data: st.DataObject
) -> None:
    """The workspace has a slot for every unit of every batch, whatever the lengths; a quantum is a power of two."""
    spans = data.draw(ragged(asked[0].capacity))
    plan = plan_of(asked, device, policy, len(spans))
    assert check_schedule(plan, spans) <= plan.max_units
    assert plan.max_run in (1, 4, 16)
    wide = max(asked[0].head_dim, asked[0].v_head_dim) > 128 and asked[0].kv_dtype.startswith("fp8")
    if wide:  # a run of sixteen would spill
        assert plan.max_run <= 4
    loaded = -(-4 * device.sm_count // plan.problem.num_kv_heads)
    assert (plan.max_run > 1) == (len(spans) * plan.max_splits > loaded)
    assert plan.rule.quantum & (plan.rule.quantum - 1) == 0


@given(taken(), GPUS, POLICIES, st.integers(1, 500))
def test_pairs_of_blocks_are_of_two_heads_in_batches_on_hopper(
    asked: tuple[DecodeProblem, int], device: DeviceSpec, policy: SplitPolicy, batch: int
) -> None:
    """A grid must be whole clusters, or the driver refuses the launch."""
    plan = plan_of(asked, device, policy, batch)
    even = plan.problem.num_kv_heads * plan.row_blocks % 2 == 0
    assert plan.cluster == (2 if batch > 1 and even and device.capability == (9, 0) else 1)
    assert plan.grid[0] % plan.cluster == 0
    assert replace(plan, backend="triton").cluster == 1


def test_a_loaded_launch_joins_in_blocks_and_a_lone_row_does_not() -> None:
    assert plan_decode(problem(), H200).max_run == 1
    loaded = plan_decode(problem(batch=200), H200)
    assert (loaded.backend, loaded.max_run) == ("cuda", 16)
    assert loaded.max_units < 200 * loaded.max_splits // 4
