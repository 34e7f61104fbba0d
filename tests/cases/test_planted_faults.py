"""Every case's test fails where the fault that it is about is planted: a test that cannot fail shows nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faults
import faults_in_python as around
import pytest
import test_cases_layout as layout
import test_cases_numbers as numbers
import test_cases_schedule as schedule
import test_cases_tools as tools
import test_closed_forms as closed
import torch
from planting import Fault, caught, copy_edited

Plant = Callable[[Fault], Any]


def test_text_that_is_not_there_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(LookupError, match="expected this text once, found it 0 times: no such words"):
        copy_edited(["cpu_call.h"], (("cpu_call.h", "no such words", ""),), tmp_path)


def test_copies_without_a_fault_pass(plant: Plant) -> None:
    """So what turns a check red below is the fault, not the copying."""
    decode = plant(Fault())
    closed.test_case_02_poison_past_the_end(decode, "both", True)
    closed.test_case_10_a_sink_counts_once(decode, 8)
    closed.test_case_18_the_cap_comes_before_the_mask(decode, "4")
    layout.test_case_12_addresses_that_no_vector_fits(decode, "k", "fp8")


def test_case_01_catches_page_offsets_in_32_bits(plant: Plant) -> None:
    decode = plant(faults.PAGE_OFFSETS_IN_32_BITS)
    with caught():
        layout.test_case_01_page_offsets_past_two_to_the_31(decode, (65_538, 2, 16, 8, 128), (5, 65_535, 65_536))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_case_02_catches_hidden_values_times_zero(plant: Plant, paged: bool) -> None:
    decode = plant(faults.VALUES_PAST_THE_END_TIMES_0)
    with caught():
        closed.test_case_02_poison_past_the_end(decode, "V", paged)


@pytest.mark.parametrize("fault", [faults.NO_K_SCALE_FOR_PAGES, around.SCALES_SWAPPED], ids=["dropped", "swapped"])
def test_case_03_catches_scales_that_go_missing(plant: Plant, fault: Fault) -> None:
    decode = plant(fault)
    with caught():
        numbers.test_case_03_scales_on_every_path(decode, True, "per head")


def test_case_04_catches_a_page_base_from_the_token_stride(plant: Plant) -> None:
    decode = plant(faults.PAGE_BASE_FROM_THE_TOKEN_STRIDE)
    with caught():
        layout.test_case_04_strided_pools(decode, "f16")


@pytest.mark.parametrize("ratio", [3, 5, 6])
def test_case_05_catches_heads_of_a_padded_group(plant: Plant, ratio: int) -> None:
    decode = plant(faults.HEADS_OF_A_PADDED_GROUP)
    layout.check_pairing(decode, 4, 2, 16, 24)
    with caught():
        layout.check_pairing(decode, ratio, 2, 16, 24)


def test_case_06_catches_a_logarithm_of_base_2(plant: Plant) -> None:
    decode = plant(faults.LSE_IN_BASE_2)
    with caught():
        numbers.test_case_06_lse_is_a_natural_logarithm(decode, "1")


def test_case_07_catches_splits_from_the_batch(plant: Plant) -> None:
    decode = plant(around.SPLITS_FROM_THE_BATCH)
    with caught():
        schedule.test_case_07_neighbours_change_no_bit(decode, "f32", "auto")


@pytest.mark.parametrize("fault", [faults.WINDOW_AS_A_DISTANCE, faults.WINDOW_LESS_ITS_OWN_KEY], ids=["+1", "-1"])
def test_case_08_catches_a_window_of_one_key_more_or_less(plant: Plant, fault: Fault) -> None:
    decode = plant(fault)
    with caught():
        closed.test_case_08_the_window_counts_the_current_key(decode, 16, 97)


def test_case_09_catches_a_launch_on_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    around.LAUNCH_ON_THE_CURRENT_DEVICE.plant("triton", monkeypatch)
    with caught():
        tools.test_case_09_launches_go_to_the_tensors_device(monkeypatch)


def test_case_09_catches_devices_that_nobody_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    around.DEVICES_NOT_COMPARED.plant("cpu", monkeypatch)
    with caught():
        tools.test_case_09_mixed_devices_are_listed("block_table")


def test_case_10_catches_a_sink_that_counts_twice(plant: Plant) -> None:
    decode = plant(faults.SINK_TWICE)
    with caught():
        closed.test_case_10_a_sink_counts_once(decode, 8)


def test_case_10_catches_a_sink_that_fills_an_empty_row(plant: Plant) -> None:
    decode = plant(faults.SINK_OF_AN_EMPTY_ROW)
    with caught():
        closed.test_case_10_a_sink_counts_once(decode, 1)


def test_case_11_catches_a_benchmark_of_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    around.ONE_SET_FOR_ALL.plant("cpu", monkeypatch)
    with caught():
        tools.test_case_11_every_call_of_a_rotation_reads_other_bytes(False)


def test_case_11_catches_a_label_that_is_always_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    around.COLD_WHATEVER_IT_READS.plant("cpu", monkeypatch)
    with caught():
        tools.test_case_11_what_a_cache_holds_is_labelled()


@pytest.mark.parametrize("which", ["k", "odd rows"])
def test_case_12_catches_wide_loads_of_narrow_addresses(plant: Plant, which: str) -> None:
    decode = plant(faults.KEYS_READ_FROM_ALIGNED_ADDRESSES)
    with caught():
        layout.test_case_12_addresses_that_no_vector_fits(decode, which, "f16")


def test_case_13_catches_scratch_that_grows(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = plant(around.SCRATCH_THAT_GROWS)
    with caught():
        schedule.test_case_13_captures_keep_their_scratch(decode, monkeypatch)


def test_case_14_catches_parts_that_nobody_wrote(plant: Plant) -> None:
    decode = plant(faults.PARTS_THAT_NOBODY_WROTE)
    with caught():
        closed.test_case_14_splits_that_see_nothing(decode, 4)


def test_case_15_catches_negative_page_ids(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = plant(faults.NEGATIVE_PAGE_IDS_USED)
    with caught():
        layout.test_case_15_ids_that_a_row_needs_and_the_pool_has_not(decode, monkeypatch)


def test_case_16_catches_e4m3_read_as_e5m2(plant: Plant) -> None:
    decode = plant(faults.E4M3_READ_AS_E5M2)
    with caught():
        numbers.test_case_16_fp8_is_read_as_it_was_written(decode, torch.float8_e4m3fn, 448.0)


def test_case_17_catches_padding_in_the_denominator(plant: Plant) -> None:
    decode = plant(faults.PADDING_IN_THE_DENOMINATOR)
    with caught():
        closed.check_lengths(decode, [1, 31, 65], paged=False)


@pytest.mark.parametrize("fault", [faults.CAP_AFTER_THE_MASK, faults.CAP_DROPPED], ids=["after the mask", "dropped"])
def test_case_18_catches_a_cap_out_of_place(plant: Plant, fault: Fault) -> None:
    decode = plant(fault)
    with caught():
        closed.test_case_18_the_cap_comes_before_the_mask(decode, "1")


def test_case_19_catches_a_launch_on_another_stream(tmp_path: Any) -> None:
    (tmp_path / "launch.py").write_text("with torch.cuda.stream(torch.cuda.default_stream()):\n    kernel[grid](q)\n")
    with caught():
        tools.check_streams(tmp_path)


def test_case_20_catches_empty_rows_that_are_not_written(plant: Plant) -> None:
    decode = plant(faults.EMPTY_ROWS_NOT_WRITTEN)
    with caught():
        closed.test_case_20_rows_of_nothing(decode, "1")


def test_case_21_catches_an_operator_that_hides_what_it_writes() -> None:
    tools.check_compiled_steps(around.append_by_an_operator(honest=True))
    with caught():
        tools.check_compiled_steps(around.append_by_an_operator(honest=False))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_case_22_catches_shared_memory_that_grows_with_the_context(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    around.TILES_THAT_GROW.plant("cpu", monkeypatch)
    with caught():
        tools.test_case_22_no_launch_grows_with_the_context("h200", backend, "bf16")


def test_case_22_catches_a_check_that_is_gone(plant: Plant) -> None:
    decode = plant(around.HEAD_SIZES_NOT_CHECKED)
    with caught():
        layout.test_case_12_head_sizes_that_no_vector_fits(decode, 72)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_case_23_catches_a_variant_chosen_by_the_batch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    around.VARIANT_FROM_THE_BATCH.plant("cpu", monkeypatch)
    with caught():
        tools.test_case_23_the_variant_never_follows_batch_or_sms("auto", backend, "bf16")


def test_case_23_catches_one_page_per_tile(plant: Plant) -> None:
    decode = plant(faults.ONE_PAGE_PER_TILE)
    with caught():
        layout.check_variants(decode, 65, 16)


def test_case_24_catches_minus_infinity_less_itself(plant: Plant) -> None:
    decode = plant(faults.JOIN_OF_NOTHING_IS_NAN)
    with caught():
        numbers.test_case_24_splits_that_a_mask_empties(decode, "4", 0.0)


@pytest.mark.parametrize("fault", around.MERGES, ids=str)
def test_case_24_catches_merges_of_nothing(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    around.edit_merge_states(fault, monkeypatch)
    with caught():
        numbers.test_case_24_merges_of_nothing(torch.float32)


def test_case_25_catches_the_first_64_parts_again(plant: Plant) -> None:
    decode = plant(faults.THE_FIRST_64_PARTS_AGAIN)
    numbers.test_case_25_reductions_of_every_width(decode, 64)
    with caught():
        numbers.test_case_25_reductions_of_every_width(decode, 128)


def test_case_26_catches_lengths_from_the_table(plant: Plant) -> None:
    decode = plant(around.LENGTHS_FROM_THE_TABLE)
    with caught():
        closed.test_case_26_a_page_allocated_ahead_is_not_read(decode, 48)


def test_case_27_catches_a_ratio_rounded_down(plant: Plant) -> None:
    decode = plant(around.RATIO_ROUNDED_DOWN)
    with caught():
        closed.test_case_27_head_counts_that_do_not_divide(decode, (7, 2))


def test_case_28_catches_lengths_of_the_capture(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = plant(around.LENGTHS_OF_THE_CAPTURE)
    with caught():
        schedule.test_case_28_replays_see_the_lengths_of_now(decode, monkeypatch)


@pytest.mark.parametrize("rule", ["bandwidth", "first sample", "spread", "warm-up"])
def test_case_29_catches_a_harness_without_the_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    around.HARNESS[rule].plant("cpu", monkeypatch)
    with caught():
        tools.test_case_29_the_harness_refuses(rule)


def test_case_30_catches_positions_in_16_bits(plant: Plant) -> None:
    decode = plant(faults.POSITIONS_IN_16_BITS)
    with caught():
        layout.test_case_30_a_needle_anywhere(decode, 65_537)


def test_case_31_catches_hidden_values_times_zero(plant: Plant) -> None:
    decode = plant(faults.VALUES_PAST_THE_END_TIMES_0)
    with caught():
        closed.test_case_31_recurrent_state_left_in_the_pages(decode)


def test_case_32_catches_a_number_forgotten_in_the_size(plant: Plant) -> None:
    decode = plant(around.WORKSPACE_OF_ONE_NUMBER_LESS)
    with caught():
        schedule.test_case_32_exactly_the_workspace(decode, (6, 2, 32, 16), 3)
