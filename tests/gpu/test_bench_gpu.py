"""The harness measures itself on a GPU (CASE-29): a read of known size, hot and cold, and one real rung."""

import pytest
import torch

from splitkv.bench import machine, record
from splitkv.bench.cases import rung_options
from splitkv.bench.roofline import Bandwidth, read_bandwidth
from splitkv.bench.timing import Rotation, TimingRejected, measure, plan_rotation

MIB = 1 << 20
SET_BYTES, BLOCK = 32 * MIB, 8192
KNOWN_TB_S = {"H200": (4.3, 4.9), "H100": (2.5, 3.4)}


@pytest.fixture(scope="module")
def bandwidth() -> Bandwidth:
    return read_bandwidth("cuda")


def test_the_sweep_reaches_what_the_card_is_known_for(bandwidth: Bandwidth) -> None:
    name = torch.cuda.get_device_name()
    low, high = next((limits for key, limits in KNOWN_TB_S.items() if key in name), (0.05, 20.0))
    assert low <= bandwidth.tb_s <= high, f"{name}: {bandwidth}"


def read_sets(rotation: Rotation, bandwidth: Bandwidth, claimed: int = 1) -> float:
    """Median microseconds to read one set with the sweep's kernel, its bytes counted `claimed` times."""
    from splitkv.bench.read_kernel import launch_read_sweep

    set_bytes = rotation.footprint_bytes // rotation.sets
    data = torch.zeros(rotation.sets, set_bytes // 4, dtype=torch.int32, device="cuda")
    sums = torch.zeros(set_bytes // 4 // BLOCK, dtype=torch.int32, device="cuda")
    timings = measure(
        {"read": lambda i: launch_read_sweep(data[i], sums, block=BLOCK, num_warps=8)},
        rotation,
        device="cuda",
        kv_bytes=claimed * set_bytes,
        bandwidth_bytes_s=bandwidth.bytes_per_s,
    )
    return timings["read"].median_us


def cold_rotation() -> Rotation:
    rotation = plan_rotation(SET_BYTES, 1 << 34, machine.cache_bytes("cuda"), "cuda")
    assert rotation is not None and rotation.cold
    return rotation


def test_a_cold_read_of_known_size_takes_as_long_as_it_must(bandwidth: Bandwidth) -> None:
    share = SET_BYTES / read_sets(cold_rotation(), bandwidth) * 1e6 / bandwidth.bytes_per_s
    assert 0.6 < share < 1.05


def test_a_hot_loop_that_claims_to_be_cold_is_refused(bandwidth: Bandwidth) -> None:
    half_of_l2 = machine.cache_bytes("cuda") // 2 // (4 * BLOCK) * (4 * BLOCK)
    with pytest.raises(TimingRejected, match="more than the memory gives"):
        read_sets(Rotation(1, half_of_l2, cold=True), bandwidth)


def test_bytes_counted_once_per_query_head_are_refused(bandwidth: Bandwidth) -> None:
    with pytest.raises(TimingRejected, match="more than the memory gives"):
        read_sets(cold_rotation(), bandwidth, claimed=4)


def test_a_rung_on_the_gpu_is_right_and_faster_than_unsplit() -> None:
    from splitkv.bench.rungs import run_rungs

    options = rung_options("cuda", lengths="20000", heads="16/4", dtypes="bf16")
    result = run_rungs(options, record.provenance(), command="test")
    (row,) = result["rows"]
    assert row["passed"], (row["parity_failures"], row["timing_rejected"])
    assert row["speedup"] > 2 and 0.2 < row["bandwidth_share"]["splitkv"] < 1.05
    assert result["compute_capability"] and result["sm_count"] and result["versions"]["cuda"]
