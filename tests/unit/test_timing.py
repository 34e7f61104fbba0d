"""The statistics of timings and the rules that reject them (CASE-29), with faults injected on purpose."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitkv.bench import timing
from splitkv.bench.timing import MIB, Rotation, TimingRejected, measure, plan_rotation, rejection, summarise

GB_S = 1e9
CACHE = 32 * MIB
COLD = Rotation(2, 1 << 30, cold=True)


# ---- statistics --------------------------------------------------------------------------------------------


def test_percentiles_interpolate() -> None:
    samples = [50.0, 10.0, 40.0, 20.0, 30.0]
    assert [timing.percentile(samples, f) for f in (0.0, 0.2, 0.5, 0.8, 1.0)] == [
        10.0,
        18.0,
        30.0,
        42.0,
        50.0,
    ]
    assert timing.percentile([7.0], 0.8) == 7.0


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=40))
def test_percentiles_are_ordered_and_within(samples: list[float]) -> None:
    result = summarise(samples)
    assert min(samples) <= result.p20_us <= result.median_us <= result.p80_us <= max(samples)
    assert result.samples == len(samples)


def test_one_slow_sample_moves_no_median() -> None:
    assert summarise([10.0, 10.0, 10.0, 9000.0, 10.0]).median_us == 10.0


@pytest.mark.parametrize("samples", [[], [0.0, 1.0], [-1.0]])
def test_samples_must_be_positive(samples: list[float]) -> None:
    with pytest.raises(TimingRejected, match="expected positive samples"):
        summarise(samples)


def test_bandwidth_is_bytes_over_time() -> None:
    assert timing.implied_gb_s(4_000_000, 1000.0) == 4.0


# ---- what a rotation covers --------------------------------------------------------------------------------


def test_small_sets_rotate_until_they_fill_what_the_device_asks_for() -> None:
    assert plan_rotation(16 * MIB, 1 << 40, CACHE, "cpu") == Rotation(32, 512 * MIB, cold=True)
    assert plan_rotation(16 * MIB, 1 << 40, CACHE, "cuda") == Rotation(128, 2048 * MIB, cold=True)


def test_large_sets_rotate_in_pairs() -> None:
    assert plan_rotation(2 << 30, 1 << 40, CACHE, "cuda") == Rotation(2, 4 << 30, cold=True)


def test_short_memory_takes_what_fits_and_says_if_it_is_cached() -> None:
    assert plan_rotation(100 * MIB, 250 * MIB, CACHE, "cpu") == Rotation(2, 200 * MIB, cold=True)
    warm = plan_rotation(16 * MIB, 40 * MIB, CACHE, "cpu")
    assert warm == Rotation(2, 32 * MIB, cold=False) and warm.label == "cache-resident"
    assert plan_rotation(100 * MIB, 99 * MIB, CACHE, "cpu") is None


def test_a_large_cache_asks_for_more() -> None:
    rotation = plan_rotation(16 * MIB, 1 << 40, 256 * MIB, "cpu")
    assert rotation is not None and rotation.footprint_bytes == 1024 * MIB


@given(st.integers(1, 1 << 32), st.integers(0, 1 << 34), st.integers(1, 1 << 30), st.sampled_from(["cpu", "cuda"]))
def test_rotations_never_exceed_the_arena(set_bytes: int, arena: int, cache: int, device: str) -> None:
    rotation = plan_rotation(set_bytes, arena, cache, device)
    if rotation is None:
        assert set_bytes > arena
    else:
        assert rotation.footprint_bytes == rotation.sets * set_bytes <= arena
        assert rotation.cold == (rotation.footprint_bytes >= 4 * cache)


@given(st.floats(0.5, 1e6), st.integers(1, 5000))
def test_graphs_hold_at_least_20_calls_and_every_set(call_us: float, sets: int) -> None:
    calls = timing.graph_calls(call_us, sets)
    assert calls >= 20 and calls % sets == 0


def test_samples_per_turn_follow_the_budget_within_limits() -> None:
    assert [timing.repeats(0.8, 2, 5, s, 10) for s in (1.0, 0.08, 0.016, 1e-5, 0.0)] == [
        1,
        1,
        5,
        10,
        10,
    ]


# ---- rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_good_samples_pass(device: str) -> None:
    assert rejection([100.0, 101.0, 99.0, 100.0], 100_000, GB_S, device, cold=True) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_bandwidth_than_the_memory_has_is_rejected(device: str) -> None:
    """A missing synchronisation, or a loop that stays in the cache."""
    reason = rejection([10.0] * 5, 100_000, GB_S, device, cold=True)
    assert reason is not None and "implies 10.0 GB/s, more than the memory gives (1.0 GB/s" in reason
    assert rejection([10.0] * 5, 100_000, GB_S, device, cold=False) is None  # labelled cache-resident instead


def test_bytes_counted_per_query_head_are_rejected() -> None:
    """The same time with K and V counted once per query head (4 times too many) passes no longer."""
    assert rejection([100.0] * 5, 100_000, GB_S, "cuda", cold=True) is None
    assert rejection([100.0] * 5, 4 * 100_000, GB_S, "cuda", cold=True) is not None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_first_sample_that_compiled_is_rejected(device: str) -> None:
    reason = rejection([50_000.0, 100.0, 101.0, 100.0], 100_000, GB_S, device, cold=True)
    assert reason is not None and "paid for a warm-up" in reason


def test_wide_spread_is_rejected_on_a_gpu_and_labelled_on_a_cpu() -> None:
    samples = [100.0, 100.0, 190.0, 190.0, 190.0]
    reason = rejection(samples, 1, GB_S, "cuda", cold=True)
    assert reason is not None and "p20 to p80 spans 47% of the median" in reason
    wide = [100.0, 100.0, 100.0, 190.0, 190.0]
    assert rejection(wide, 1, GB_S, "cpu", cold=True) is None
    assert timing.noisy(summarise(wide), "cpu")
    assert not timing.noisy(summarise([100.0, 101.0, 102.0]), "cpu")


# ---- the CPU sampler ---------------------------------------------------------------------------------------


def measured(contenders: dict[str, timing.Call], bandwidth: float = 1e12, sets: int = 3) -> dict[str, timing.Timing]:
    rotation = Rotation(sets, 1 << 30, cold=True)
    arguments = {"device": "cpu", "kv_bytes": 1000, "bandwidth_bytes_s": bandwidth, "budget_s": 0.02}
    return measure(contenders, rotation, **arguments)  # type: ignore[arg-type]


def test_contenders_take_turns_and_every_call_takes_the_next_set() -> None:
    log: list[tuple[str, int]] = []

    def contender(name: str) -> timing.Call:
        def call(i: int) -> None:
            log.append((name, i))
            time.sleep(0.001)

        return call

    result = measured({"a": contender("a"), "b": contender("b")})
    assert [i for _, i in log] == [n % 3 for n in range(len(log))]
    turns = [name for n, (name, _) in enumerate(log) if n == 0 or log[n - 1][0] != name]
    assert turns == ["a", "b"] * (len(turns) // 2) and len(turns) >= 2 * timing.ROUNDS["cpu"]
    assert all(900 < t.median_us < 50_000 and t.samples >= timing.ROUNDS["cpu"] for t in result.values())


def test_a_first_call_is_never_a_sample() -> None:
    calls = 0

    def call(_: int) -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.2 if calls == 1 else 0.001)

    assert measured({"jit": call})["jit"].p80_us < 100_000


def test_a_call_that_returns_before_its_work_is_done_is_refused() -> None:
    tries: list[int] = []
    with pytest.raises(TimingRejected, match=r"hasty: .* more than the memory gives"):
        measured({"hasty": tries.append}, bandwidth=1000.0)
    assert len(tries) >= timing.ATTEMPTS * timing.ROUNDS["cpu"]
