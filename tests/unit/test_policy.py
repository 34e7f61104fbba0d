"""Split policies: every value that the three reference systems pin, their texts, and resolution.

Properties over all shapes are in test_plan.py."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitkv.policy import (
    SATURATED,
    SplitPolicy,
    SplitRule,
    packs_gqa,
    parse_switch,
    resolve_policy,
    workspace_slots,
)
from splitkv.problem import DecodeProblem, DeviceSpec

H200 = DeviceSpec.named("h200")
AUTO, WAVES, CAPACITY, LENGTH = (
    SplitPolicy.auto(),
    SplitPolicy.waves(),
    SplitPolicy.capacity(),
    SplitPolicy.length(),
)
LONGEST = 262_144


def problem(**changes: Any) -> DecodeProblem:
    fields: dict[str, Any] = dict(batch=1, num_q_heads=16, num_kv_heads=4, head_dim=256)
    return DecodeProblem(**(fields | changes))


def gpu(sm_count: int) -> DeviceSpec:
    return replace(H200, sm_count=sm_count)


# ------------------------------------------------------------------------------------------ pinned values


@pytest.mark.parametrize(
    ("seq_len", "chunk", "n"),
    [
        (1, 64, 1),
        (5, 64, 1),
        (64, 64, 1),
        (65, 64, 2),
        (4096, 64, 64),
        (4097, 64, 65),
        (16384, 64, 256),
        (16385, 65, 253),
        (20000, 79, 254),
        (60000, 235, 256),
        (148000, 579, 256),
        (262144, 1024, 256),
    ],
)
def test_length(seq_len: int, chunk: int, n: int) -> None:
    assert LENGTH.split(seq_len, problem(), H200) == (chunk, n)


def test_length_target_and_minimum_are_parameters() -> None:
    assert SplitPolicy.length(10, 7).split(1000, problem(), H200) == (100, 10)
    assert SplitPolicy.length(10, 7).split(36, problem(), H200) == (7, 6)
    assert SplitPolicy.length(target=1).split(LONGEST, problem(), H200) == (LONGEST, 1)
    assert SplitPolicy.length(10**6, 3).split(203, problem(), H200) == (3, 68)
    assert SplitPolicy.length(10**6, 7).split(203, problem(), H200) == (7, 29)


@pytest.mark.parametrize("target,minimum", [(0, 64), (256, 0), (-1, 64), (256, -1)])
def test_length_refuses_target_or_minimum_0(target: int, minimum: int) -> None:
    with pytest.raises(ValueError, match=rf"length policy: expected .* >= 1, got {target} and {minimum}"):
        SplitPolicy.length(target, minimum)


def test_length_refuses_an_empty_row() -> None:
    with pytest.raises(ValueError, match=r"seq_len: .* at least 1 key, got 0"):
        LENGTH.split(0, problem(), H200)


def test_length_covers_every_length() -> None:
    rule = LENGTH.rule(problem(), H200)
    for seq_len in range(1, LONGEST + 1):
        chunk, n = rule.split(seq_len)
        assert chunk == max(64, (seq_len + 255) // 256)
        assert (n - 1) * chunk < seq_len <= n * chunk
        assert n <= 256


@pytest.mark.parametrize(
    ("policy", "capacity", "n", "chunk"),
    [
        (CAPACITY, 4096, 32, 128),
        (CAPACITY, 16384, 32, 512),
        (CAPACITY, 512, 4, 128),
        (CAPACITY, 128, 1, None),
        (CAPACITY, 1, 1, None),
        (CAPACITY, 129, 2, 128),  # the original's chunks of 65 and 86 went under its own floor
        (CAPACITY, 257, 3, 128),
        (SplitPolicy.capacity(256), 4096, 16, 256),
        (SplitPolicy.capacity(256), 512, 2, 256),
        (SplitPolicy.capacity(256), 256, 1, None),
        (SplitPolicy.capacity(256), 262144, 64, 4096),  # the original left keys 16,384 on to no split
        (SplitPolicy.capacity(32), 262143, 64, 4096),
        (SplitPolicy.capacity(32), 64, 2, 32),
        (SplitPolicy.capacity(31), 4096, 32, 128),  # an override under 32 is ignored
        (SplitPolicy.capacity(0), 4096, 32, 128),
    ],
)
def test_capacity_at_16_rows(policy: SplitPolicy, capacity: int, n: int, chunk: int | None) -> None:
    asked = problem(capacity=capacity)
    assert policy.split(capacity, asked, H200) == (capacity if chunk is None else chunk, n)


@pytest.mark.parametrize("policy", [CAPACITY, SplitPolicy.capacity(256)])
def test_capacity_0_is_one_split(policy: SplitPolicy) -> None:
    assert policy.rule(problem(capacity=0), H200) == SplitRule(1)


@pytest.mark.parametrize(
    ("changes", "n"),
    [
        ({}, 32),
        ({"batch": 2}, 16),
        ({"batch": 31}, 2),
        ({"batch": 32}, 1),
        ({"q_len": 4}, 8),
        ({"batch": 3, "q_len": 2}, 6),
        ({"num_q_heads": 4}, 64),
    ],
)
def test_capacity_counts_rows_as_batch_by_heads_by_queries(changes: dict[str, Any], n: int) -> None:
    assert CAPACITY.split(LONGEST, problem(**changes), H200)[1] == n


def test_capacity_cuts_short_rows_as_the_full_cache() -> None:
    """Eager and captured launches agree: the geometry comes from the capacity alone."""
    asked = problem(capacity=16384)
    assert {CAPACITY.split(length, asked, H200)[0] for length in (1, 300, 5000, 16384)} == {512}


@pytest.mark.parametrize(
    ("sm_count", "heads", "n"),
    [(132, 24, 11), (48, 24, 4), (148, 24, 13), (132, 512, 1), (132, 1, 16), (0, 1, 2), (0, 24, 1)],
)
def test_waves(sm_count: int, heads: int, n: int) -> None:
    assert WAVES.split(LONGEST, problem(num_q_heads=heads, num_kv_heads=1), gpu(sm_count))[1] == n


@pytest.mark.parametrize("seq_len,active", [(1, 1), (256, 1), (257, 2), (300, 2), (1335, 6), (4847, 11), (16384, 11)])
def test_waves_active_splits_of_11(seq_len: int, active: int) -> None:
    chunk, n = WAVES.split(seq_len, problem(num_q_heads=24), H200)
    assert n == active
    assert chunk == max(256, -(-seq_len // 11))


@pytest.mark.parametrize(
    ("sm_count", "heads", "ref", "batch", "n"),
    [
        (48, 24, 16, 1, 1),
        (132, 24, 16, 1, 1),
        (48, 8, 1, 1, 6),
        (48, 8, 6, 1, 1),
        (48, 8, 1, 6, 1),  # the batch counts where it is more than the reference
        (48, 8, 5, 3, 1),
        (48, 8, 2, 3, 2),
        (132, 1, 1, 1, 132),  # not capped
        (0, 8, 1, 1, 1),
    ],
)
def test_legacy(sm_count: int, heads: int, ref: int, batch: int, n: int) -> None:
    asked = problem(num_q_heads=heads, num_kv_heads=1, batch=batch)
    assert SplitPolicy.legacy(ref).rule(asked, gpu(sm_count)).max_splits(LONGEST) == n


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 100, 256])
def test_pinned(n: int) -> None:
    policy = SplitPolicy.pinned(n)
    assert policy.split(LONGEST, problem(), H200) == (-(-LONGEST // n), n)
    assert policy.split(min(n, 2), problem(), H200)[1] == min(n, 2)
    for seq_len in range((n - 1) ** 2 + 1, (n - 1) ** 2 + 3 * n):
        assert policy.split(seq_len, problem(), H200)[1] == n


@pytest.mark.parametrize("n", [0, -1])
def test_pinned_refuses_less_than_one_split(n: int) -> None:
    with pytest.raises(ValueError, match=f"pinned policy: expected at least 1 split, got {n}"):
        SplitPolicy.pinned(n)


@pytest.mark.parametrize("seq_len", [-1, 4097])
def test_a_length_no_row_can_have_is_refused(seq_len: int) -> None:
    with pytest.raises(ValueError, match=rf"seq_len: expected 0\.\.4096 \(the capacity\), got {seq_len}"):
        AUTO.split(seq_len, problem(capacity=4096), H200)


# -------------------------------------------------------------------------------- texts and resolution


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("auto", AUTO),
        ("waves", WAVES),
        ("capacity", CAPACITY),
        ("length", LENGTH),
        ("legacy", SplitPolicy.legacy(1)),
        ("  AuTo\n", AUTO),
        ("\tWAVES ", WAVES),
        ("Capacity", CAPACITY),
        *((text, SplitPolicy.pinned(1)) for text in ("0", "off", "false", "no", " OFF ", "nO", "1", "00")),
        ("2", SplitPolicy.pinned(2)),
        ("007", SplitPolicy.pinned(7)),
        ("16", SplitPolicy.pinned(16)),
        ("17", SplitPolicy.pinned(16)),
        ("999", SplitPolicy.pinned(16)),
        ("1000000", SplitPolicy.pinned(16)),
        ("9" * 5000, SplitPolicy.pinned(16)),  # int() refuses a text this long
        ("0" * 5000 + "3", SplitPolicy.pinned(3)),
        ("0" * 5000, SplitPolicy.pinned(1)),
    ],
)
def test_parse(text: str, policy: SplitPolicy) -> None:
    assert SplitPolicy.parse(text) == policy


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "on", "true", "yes", "automatic", "au to", "-1", "+4", "1.5", "1e3", "0x10", "1_0"),
        *("٣", "²", "auto; rm"),
        *("pinned", "pinned()", "pinned(0)", "pinned(-1)", "pinned(1,2)", "pinned(2", "auto(1)", "waves(1)"),
        *("length(0,64)", "length(256,0)", "length(1,2,3)", "length(,)", "capacity(1,2)", "legacy(1,2)"),
        "pinned(" + "9" * 5000 + ")",
    ],
)
def test_anything_else_parses_to_nothing(text: str) -> None:
    assert SplitPolicy.parse(text) is None


POLICIES = st.one_of(
    st.sampled_from([AUTO, WAVES]),
    st.builds(SplitPolicy.capacity, st.none() | st.integers(0, LONGEST)),
    st.builds(SplitPolicy.length, st.integers(1, 4096), st.integers(1, 4096)),
    st.builds(SplitPolicy.legacy, st.integers(0, 2000)),
    st.builds(SplitPolicy.pinned, st.integers(1, 4096)),
)


@given(POLICIES)
def test_labels_round_trip(policy: SplitPolicy) -> None:
    assert SplitPolicy.parse(policy.label) == policy
    assert SplitPolicy.parse(f" {policy.label.upper()} ") == policy


@pytest.mark.parametrize(
    ("policy", "label"),
    [
        (AUTO, "auto"),
        (WAVES, "waves"),
        (CAPACITY, "capacity"),
        (SplitPolicy.capacity(256), "capacity(256)"),
        (LENGTH, "length"),
        (SplitPolicy.length(100, 32), "length(100,32)"),
        (SplitPolicy.legacy(1), "legacy"),
        (SplitPolicy.legacy(16), "legacy(16)"),
        (SplitPolicy.pinned(1), "pinned(1)"),
        (SplitPolicy.pinned(40), "pinned(40)"),
    ],
)
def test_labels(policy: SplitPolicy, label: str) -> None:
    assert policy.label == label


@given(
    st.text("0123456789(),. -autowvescpiylnghd", max_size=12) | st.binary(max_size=8).map(lambda b: b.decode("latin-1"))
)
def test_no_text_breaks_parse(text: str) -> None:
    policy = SplitPolicy.parse(text)
    assert policy is None or policy.rule(problem(), H200).target >= 1


@pytest.mark.parametrize(
    ("declared", "environ", "policy", "from_environment"),
    [
        ("auto", {}, AUTO, False),
        ("Waves", {}, WAVES, False),
        (SplitPolicy.legacy(16), {}, SplitPolicy.legacy(16), False),
        ("auto", {"SPLITKV_POLICY": "waves"}, WAVES, True),
        ("auto", {"SPLITKV_POLICY": " AUTO "}, AUTO, True),
        (SplitPolicy.pinned(40), {"SPLITKV_POLICY": "off"}, SplitPolicy.pinned(1), True),
        ("nonsense", {"SPLITKV_POLICY": "999"}, SplitPolicy.pinned(16), True),
        ("waves", {"OTHER": "length"}, WAVES, False),
    ],
)
def test_resolution(
    declared: str | SplitPolicy, environ: dict[str, str], policy: SplitPolicy, from_environment: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_policy(declared, environ) == (policy, from_environment)


@pytest.mark.parametrize("text", ["nonsense", "", "-1"])
def test_a_bad_environment_is_reported_and_the_declaration_kept(text: str) -> None:
    with pytest.warns(UserWarning, match="SPLITKV_POLICY=.*names no policy; keeping 'waves'"):
        assert resolve_policy("waves", {"SPLITKV_POLICY": text}) == (WAVES, False)


def test_a_bad_declaration_is_reported_and_becomes_auto() -> None:
    with pytest.warns(UserWarning, match="policy 'nonsense' is not known; using auto"):
        assert resolve_policy("nonsense", {}) == (AUTO, False)
    with pytest.warns(UserWarning) as caught:
        assert resolve_policy("nonsense", {"SPLITKV_POLICY": "worse"}) == (AUTO, False)
    assert len(caught) == 2


def test_resolution_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_POLICY", "5")
    assert resolve_policy("waves") == (SplitPolicy.pinned(5), True)
    monkeypatch.delenv("SPLITKV_POLICY")
    assert resolve_policy("waves") == (WAVES, False)


# ------------------------------------------------------------------------------- workspace and packing


@pytest.mark.parametrize(
    ("policy", "changes", "sm_count", "slots"),
    [
        (WAVES, {}, 132, 32 * 24 * 11),
        (WAVES, {"batch": 32}, 132, 8448),
        (WAVES, {"batch": 33}, 132, 33 * 24 * 11),
        (WAVES, {"q_len": 2}, 132, 2 * 8448),
        (SplitPolicy.pinned(16), {}, 132, 32 * 24 * 16),
        (SplitPolicy.pinned(1), {}, 132, 32 * 24),
        (LENGTH, {"batch": 40}, 132, 40 * 24 * 256),
        (SplitPolicy.legacy(), {}, 132, 132),
        (SplitPolicy.legacy(16), {"batch": 500}, 48, 48),
        (SplitPolicy.legacy(), {}, 0, 1),
        (SplitPolicy.pinned(2**62), {"batch": 2**40, "capacity": 2**62}, 132, SATURATED),
    ],
)
def test_workspace_slots(policy: SplitPolicy, changes: dict[str, Any], sm_count: int, slots: int) -> None:
    asked = problem(num_q_heads=24, **changes)
    assert workspace_slots(asked, gpu(sm_count), policy) == slots
    assert SATURATED == 2**63 - 1


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "packs"),
    [
        (24, 4, 256, True),
        (6, 1, 256, True),
        (12, 2, 256, True),
        (32, 4, 256, False),
        (16, 4, 256, False),
        (24, 24, 256, False),
        (24, 1, 256, False),
        (25, 4, 256, False),
        (24, 4, 128, False),
        (24, 4, 512, False),
        (0, 0, 256, False),
        (6, 0, 256, False),
        (0, 4, 256, False),
    ],
)
def test_the_packing_gate_of_width_6_at_256(q_heads: int, kv_heads: int, head_dim: int, packs: bool) -> None:
    assert packs_gqa(q_heads, kv_heads, head_dim, width=6, only_head_dim=256) is packs


@pytest.mark.parametrize(
    ("packs", "q_heads", "kv_heads"),
    [
        *((True, *heads) for heads in ((24, 4), (16, 4), (24, 24), (64, 1), (7, 1), (5, 5), (1, 1))),
        *((False, *heads) for heads in ((25, 4), (7, 2), (2, 4), (0, 0), (4, 0), (0, 1), (-4, -2))),
    ],
)
@pytest.mark.parametrize("head_dim", [16, 128, 256, 576])
def test_our_packing_gate_takes_any_integer_ratio(q_heads: int, kv_heads: int, packs: bool, head_dim: int) -> None:
    assert packs_gqa(q_heads, kv_heads, head_dim) is packs
    assert packs_gqa(q_heads, kv_heads, head_dim, enabled=False) is False


@pytest.mark.parametrize("declared", [True, False])
def test_switch_texts(declared: bool) -> None:
    for text in ("1", "on", "true", "yes", " ON ", "True", "YES\n"):
        assert parse_switch(text, declared) is True
    for text in ("0", "off", "false", "no", " Off", "FALSE", "No"):
        assert parse_switch(text, declared) is False
    for text in ("", "2", "y", "n", "enabled", "tru", "on off"):
        assert parse_switch(text, declared) is declared


def test_capacity_slots_cover_the_smaller_batch_that_needs_more() -> None:
    """At 16 heads, 32 rows are not split, but 31 rows are, in two."""
    asked = problem(batch=32)
    assert CAPACITY.rule(replace(asked, batch=31), H200).max_splits(LONGEST) == 2
    assert workspace_slots(asked, H200, CAPACITY) >= 31 * 16 * 2


@pytest.mark.parametrize(
    ("policy", "invariant"),
    [
        (AUTO, True),
        (WAVES, True),
        (LENGTH, True),
        (SplitPolicy.pinned(4), True),
        (SplitPolicy.capacity(256), True),
        (CAPACITY, False),
        (SplitPolicy.legacy(16), False),
    ],
)
def test_policies_that_read_the_batch_say_so(policy: SplitPolicy, invariant: bool) -> None:
    assert policy.batch_invariant is invariant
    rules = {policy.rule(problem(batch=batch), gpu(1000)) for batch in range(1, 64)}
    assert (len(rules) == 1) is invariant
