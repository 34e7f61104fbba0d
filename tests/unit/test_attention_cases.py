"""The cases of `splitkv bench attention`: the table of goals is all there, and a pattern picks what it says."""

import pytest

from splitkv.bench.attention_cases import (
    CPU,
    CPU_THREADS,
    RAGGED_LONGEST,
    RAGGED_SHORTEST,
    AttentionCase,
    all_cases,
    select_cases,
)

# batch, heads, head_dim, length, KV: the rows whose goals the project set itself.
GOALS = """
1, 16/4, 256, 4096, bf16
1, 16/4, 256, 20000, bf16
1, 16/4, 256, 60000, bf16
1, 16/4, 256, 148000, bf16
1, 16/4, 256, 262144, bf16
1, 16/4, 256, 20000, f32
1, 16/4, 256, 262144, f32
1, 16/4, 256, 20000, fp8
1, 16/4, 256, 262144, fp8
1, 24/4, 256, 20000, bf16
1, 24/4, 256, 262144, bf16
1, 8/2, 256, 20000, bf16
1, 8/2, 256, 262144, bf16
1, 32/8, 128, 4096, bf16
1, 32/8, 128, 32768, bf16
1, 32/8, 128, 131072, bf16
16, 32/8, 128, 8192, bf16
64, 32/8, 128, 4096, bf16
1, 32/8, 128, 131072, fp8
64, 8/1, 128, 8192, bf16
1, 14/2, 64, 32768, bf16
1, 14/2, 64, 512, bf16
""".strip().splitlines()


def test_every_row_of_the_table_of_goals_is_a_case() -> None:
    assert {case.name for case in all_cases() if case.group == "table"} == set(GOALS)


def test_no_two_cases_of_a_group_share_a_name() -> None:
    names = [(case.group, case.name) for case in all_cases()]
    assert len(set(names)) == len(names)


def test_every_case_is_a_problem_that_holds_its_rows() -> None:
    for case in all_cases():
        assert case.problem.capacity >= max(case.row_lens), case.name
        assert len(case.row_lens) == case.batch and max(case.row_lens) == case.seq_len, case.name
        assert case.set_keys >= sum(case.row_lens), case.name
        assert case.row_keys % case.pool_page == 0, case.name


def test_what_is_asked_beyond_the_table_is_there() -> None:
    cases = all_cases()
    ragged = {case.batch for case in cases if case.lens and case.kv_dtype == "bf16"}
    assert ragged == {8, 32, 128}
    assert {case.page_size for case in cases if case.group == "pages"} == {16, 64}
    assert {case.q_len for case in cases} == {1, 4}
    assert any((case.head_dim, case.v_dim) == (192, 128) for case in cases)
    assert {case.capacity for case in cases if case.group == "cost-capacity"} >= {4096, 262_144}


def test_ragged_lengths_are_the_same_every_time_and_spread_over_the_range() -> None:
    for case in (case for case in all_cases() if case.lens):
        assert min(case.lens) >= RAGGED_SHORTEST and max(case.lens) <= RAGGED_LONGEST
        again = next(other for other in all_cases() if (other.group, other.name) == (case.group, case.name))
        assert again.lens == case.lens
    lens = next(case.lens for case in all_cases() if case.batch == 128)
    below = sum(n < 8192 for n in lens)  # the middle of 1k to 64k on a logarithmic scale
    assert 45 <= below <= 83


def test_bytes_count_valid_keys_only() -> None:
    case = AttentionCase("x", 2, 8, 2, 64, 100, "f16", v_head_dim=32, page_size=16, lens=(100, 7))
    assert case.read_bytes == 107 * 2 * (64 + 32) * 2
    assert case.set_keys == (7 + 1) * 16


def test_quick_keeps_the_first_of_every_group() -> None:
    every, quick = select_cases(), select_cases(quick=True)
    assert {case.group for case in quick} == {case.group for case in every}
    assert len(quick) < len(every) / 2


def test_a_pattern_sees_group_and_name() -> None:
    assert {case.group for case in select_cases("^ragged:")} == {"ragged"}
    assert [case.name for case in select_cases("table: 1, 14/2, 64, 512")] == ["1, 14/2, 64, 512, bf16"]


@pytest.mark.parametrize("pattern", ["(", "no such case"])
def test_a_pattern_that_picks_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="cases: expected"):
        select_cases(pattern)


def test_a_cpu_gets_no_case_of_many_hundred_megabytes_but_its_own() -> None:
    on_cpu = [case for case in select_cases(device="cpu") if case.group not in (CPU, CPU_THREADS)]
    assert max(case.set_keys * case.key_bytes for case in on_cpu) <= 288 << 20
    assert any(case.group == "table" for case in on_cpu)


def test_a_cpu_is_asked_for_every_length_and_dtype_and_no_gpu_is() -> None:
    asked = {
        (case.num_q_heads, case.num_kv_heads, case.head_dim, case.seq_len, case.kv_dtype)
        for case in select_cases("^cpu:", device="cpu")
    }
    heads = ((16, 4, 256), (32, 8, 128), (14, 2, 64))
    lengths, dtypes = (4096, 32_768, 262_144), ("f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2")
    assert asked == {(*shape, length, dtype) for shape in heads for length in lengths for dtype in dtypes}
    assert not any(case.group in (CPU, CPU_THREADS) for case in select_cases())


@pytest.mark.parametrize(("cores", "threads"), [(1, {1}), (2, {1, 2}), (12, {1, 2, 4, 8}), (16, {1, 2, 4, 8, 16})])
def test_threads_go_up_to_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int, threads: set[int]) -> None:
    monkeypatch.setattr("splitkv.bench.attention_cases.usable_cores", lambda: cores)
    chosen = select_cases("^cpu-threads:", device="cpu")
    assert {case.threads for case in chosen} == threads and all(case.cost_only for case in chosen)
    assert ("1 thread" in chosen[0].name) and len({case.name for case in chosen}) == len(chosen)
