"""plan_memory: the sum, the pinned cases, and what must hold for every model and size of memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitkv import MemoryPlan, plan_memory
from splitkv.cache.memory import RESERVE_BYTES, UNIFIED_RESERVE_BYTES, AttentionLayers, ModelGeometry
from splitkv.cache.models import WEIGHT_BITS
from splitkv.problem import DTYPE_BYTES, MAX_CONTEXT, MIB

GIB = 1024 * MIB
FREE, TOTAL = 23_300 * MIB, 24_035 * MIB

# The case table comes from a system that ran Qwen3.5 9B and 27B on a 24 GB card, so its weights were quantised; it does
# not say how. With this geometry f32 KV at 262,144 takes 16,384 MiB, so "f32 in 23,300 MiB" needs 9B weights of at
# most 6,354 MiB, and "f16 in 22,000 MiB" needs them over 5,054 MiB: 4.74 to 5.95 bits per weight. 27B at 148,000
# exceeds 24,035 MiB in f16 KV above 4.41 bits. llama.cpp's Q4_K_M (4.84 bits) is the usual 4-bit format in that range.
BITS = WEIGHT_BITS["q4_k_m"]
PARAMETERS = {"9B": 8_953_803_264, "27B": 26_895_998_464}


def weights(name: str, bits: float = BITS) -> int:
    return round(PARAMETERS[name] * bits / 8)


def qwen(name: str, bits: float = BITS) -> ModelGeometry:
    layers, query_heads, state = {"9B": (8, 16, 51_904_512), "27B": (16, 24, 154_927_104)}[name]
    return ModelGeometry(name, weights(name, bits), query_heads, (AttentionLayers(layers, 4, 256),), state)


CASES = [
    ("9B", 20_000, FREE, "f32", None),
    ("9B", 148_000, FREE, "f32", None),
    ("9B", 262_144, FREE, "f32", None),
    ("9B", 262_144, 22_000 * MIB, "f16", None),
    ("27B", 148_000, FREE, "f16", "exceeds_device"),
]


def outcomes(bits: float) -> list[tuple[str, str | None]]:
    plans = (plan_memory(qwen(c[0], bits), c[1], free_bytes=c[2], total_bytes=TOTAL) for c in CASES)
    return [(plan.kv_dtype, plan.refusal) for plan in plans]


@pytest.mark.parametrize(("name", "context", "free", "kv_dtype", "refusal"), CASES)
def test_case_table(name: str, context: int, free: int, kv_dtype: str, refusal: str | None) -> None:
    plan = plan_memory(qwen(name), context, free_bytes=free, total_bytes=TOTAL)
    assert (plan.kv_dtype, plan.refusal, plan.fits) == (kv_dtype, refusal, refusal is None)


def test_case_table_holds_for_the_stated_range_of_weights_and_no_other() -> None:
    wanted = [case[3:] for case in CASES]
    assert all(outcomes(bits) == wanted for bits in (4.74, BITS, 5.0, 5.68, 5.95))
    assert all(outcomes(bits) != wanted for bits in (4.5, 4.73, 5.96, 8.5, 16.0))


def test_the_sum_is_the_documented_one() -> None:
    plan = plan_memory(qwen("9B"), 1000, generated=24, free_bytes=FREE, workspace_bytes=7, batch=3)
    assert plan.terms == {
        "weights": weights("9B"),
        "kv_cache": 3 * 65_536 * 1025,
        "recurrent_state": 3 * 51_904_512,
        "workspace": 7,
        "reserve": 512 * MIB,
    }
    assert plan.need_bytes == sum(plan.terms.values()) and plan.fits


def test_the_arithmetic_is_one_line_with_every_term() -> None:
    plan = plan_memory(qwen("9B"), 262_144, free_bytes=FREE, total_bytes=TOTAL, workspace_bytes=2_113_536)
    state = f"recurrent state 51,904,512 + workspace 2,113,536 + reserve {RESERVE_BYTES:,}"
    kv = "f32 KV 65,536 B/token x 262,145 tokens = 17,179,934,720"
    total = f"{plan.need_bytes:,} B <= {FREE:,} B free: fits with f32 KV"
    assert plan.arithmetic == f"weights {weights('9B'):,} + {kv} + {state} = {total}"
    refused = plan_memory(qwen("27B"), 148_000, free_bytes=FREE, total_bytes=TOTAL)
    assert refused.arithmetic.endswith(f"> {FREE:,} B free: refused, exceeds_device (an empty device has {TOTAL:,} B)")
    several = plan_memory(qwen("9B"), 9, free_bytes=80 * GIB, unified=True, batch=2)
    assert "2 rows x (65,536 B/token x 10 tokens) = 1,310,720 " in several.arithmetic
    assert f"<= {64 * GIB:,} B ({80 * GIB:,} available - {16 * GIB:,})" in several.arithmetic


def test_co_tenant_is_told_from_a_device_that_is_too_small() -> None:
    model = qwen("9B")
    need = plan_memory(model, 262_144, free_bytes=0).tried["f16"]
    for free, total, refusal in (
        (need - 1, need, "co_tenant"),
        (need - 1, need - 1, "exceeds_device"),
        (need - 1, None, "exceeds_device"),
        (need, None, None),
    ):
        assert plan_memory(model, 262_144, free_bytes=free, total_bytes=total).refusal == refusal


def test_unified_memory_leaves_16_gib_to_the_system() -> None:
    model = qwen("9B")
    need = plan_memory(model, 148_000, free_bytes=0, kv_dtypes=("f32",)).need_bytes
    asked: dict[str, Any] = {"unified": True, "kv_dtypes": ("f32",), "total_bytes": 120 * GIB}
    exact = plan_memory(model, 148_000, free_bytes=need + UNIFIED_RESERVE_BYTES, **asked)
    assert exact.fits and exact.available_bytes == need
    short = plan_memory(model, 148_000, free_bytes=need + UNIFIED_RESERVE_BYTES - 1, **asked)
    assert short.refusal == "co_tenant"
    tight = {**asked, "total_bytes": need + UNIFIED_RESERVE_BYTES - 1}
    assert plan_memory(model, 148_000, free_bytes=0, **tight).refusal == "exceeds_device"


def test_the_longest_supported_context_is_allowed_and_one_more_is_not() -> None:
    model = qwen("9B")
    assert plan_memory(model, MAX_CONTEXT, free_bytes=FREE).tokens == MAX_CONTEXT + 1
    assert plan_memory(model, MAX_CONTEXT - 5, generated=5, free_bytes=FREE).fits
    for context, generated_tokens in ((MAX_CONTEXT + 1, 0), (MAX_CONTEXT, 1)):
        with pytest.raises(ValueError, match="context: expected at most 262144 tokens with the generated, got 262145"):
            plan_memory(model, context, generated=generated_tokens, free_bytes=FREE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": -1}, "context: expected at least 0, got -1"),
        ({"context": 1.5}, "context: expected an integer, got 1.5"),
        ({"generated": -1}, "generated: expected at least 0"),
        ({"batch": 0}, "batch: expected at least 1, got 0"),
        ({"workspace_bytes": -1}, "workspace_bytes: expected at least 0"),
        ({"free_bytes": -1}, "free_bytes: expected at least 0"),
        ({"free_bytes": 2, "total_bytes": 1}, "total_bytes: expected at least 2, got 1"),
        ({"kv_dtypes": ()}, "kv_dtypes: expected at least one"),
        ({"kv_dtypes": "f16"}, "kv_dtypes: expected a sequence"),
        ({"kv_dtypes": ("int8",)}, "kv_dtypes: expected one of f32"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_memory(**{"model": qwen("9B"), "context": 1, "free_bytes": FREE, **change})


def test_a_model_of_another_kind_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="model: expected a ModelGeometry .* got dict"):
        plan_memory({}, 1, free_bytes=1)  # type: ignore[arg-type]


# ---- for every model ---------------------------------------------------------------------------------------

LAYERS = st.builds(
    AttentionLayers,
    layers=st.integers(1, 64),
    num_kv_heads=st.integers(1, 16),
    head_dim=st.sampled_from((64, 128, 256, 576)),
    v_head_dim=st.sampled_from((0, 64, 128)),
    window=st.none() | st.integers(1, 5000),
    v_in_k=st.booleans(),
)
MODELS = st.builds(
    ModelGeometry,
    name=st.just("any"),
    weights_bytes=st.integers(0, 40 * GIB),
    num_q_heads=st.just(16),
    attention=st.lists(LAYERS, min_size=0, max_size=3).map(tuple),
    state_bytes=st.integers(0, GIB),
)
CONTEXTS = st.integers(0, MAX_CONTEXT - 100)
SIZES = st.integers(0, 200 * GIB)
EXTRAS = st.fixed_dictionaries(
    {
        "generated": st.integers(0, 100),
        "batch": st.integers(1, 8),
        "workspace_bytes": st.integers(0, GIB),
        "unified": st.booleans(),
    }
)


@given(MODELS, CONTEXTS, SIZES, EXTRAS)
def test_terms_add_up_and_the_verdict_follows_from_them(
    model: ModelGeometry, context: int, free: int, extras: dict[str, Any]
) -> None:
    plan = plan_memory(model, context, free_bytes=free, **extras)
    record = plan.as_dict()
    assert sum(record["terms"].values()) == record["need_bytes"] == plan.tried[plan.kv_dtype]
    assert plan.fits == (plan.need_bytes <= plan.available_bytes)
    assert plan.kv_dtype == "f32" or plan.tried["f32"] > plan.available_bytes
    assert "\n" not in plan.arithmetic and f"= {plan.need_bytes:,} B" in plan.arithmetic


@given(MODELS, CONTEXTS, EXTRAS, st.sampled_from(sorted(DTYPE_BYTES)))
def test_need_equal_to_free_fits_and_one_byte_less_does_not(
    model: ModelGeometry, context: int, extras: dict[str, Any], kv_dtype: str
) -> None:
    asked = {**extras, "kv_dtypes": (kv_dtype,)}
    need = plan_memory(model, context, free_bytes=0, **asked).need_bytes
    free = need + (UNIFIED_RESERVE_BYTES if extras["unified"] else 0)
    assert plan_memory(model, context, free_bytes=free, **asked).fits
    less = plan_memory(model, context, free_bytes=free - 1, total_bytes=free, **asked)
    assert less.refusal == "co_tenant"
    assert plan_memory(model, context, free_bytes=free - 1, **asked).refusal == "exceeds_device"


@given(MODELS, CONTEXTS, CONTEXTS, EXTRAS)
def test_need_never_falls_as_the_context_grows(
    model: ModelGeometry, one: int, other: int, extras: dict[str, Any]
) -> None:
    short, long = (
        plan_memory(model, context, free_bytes=0, **extras).tried for context in (min(one, other), max(one, other))
    )
    assert all(short[kv_dtype] <= long[kv_dtype] for kv_dtype in short)
    assert short["f16"] <= short["f32"]


@given(MODELS, CONTEXTS, st.integers(-100_000, 100_000), EXTRAS, st.sampled_from(sorted(DTYPE_BYTES)))
def test_the_largest_context_fits_and_one_more_token_does_not(
    model: ModelGeometry, near: int, slack: int, extras: dict[str, Any], kv_dtype: str
) -> None:
    """In memory that a context near `near` just about fills, so that the search has an edge to find."""
    asked = {**extras, "kv_dtypes": (kv_dtype,)}
    need = plan_memory(model, near, free_bytes=0, **asked).need_bytes
    free = need + slack + (UNIFIED_RESERVE_BYTES if extras["unified"] else 0)

    def plan(context: int) -> MemoryPlan:
        return plan_memory(model, context, free_bytes=free, **asked)

    largest = plan(0).largest_context(kv_dtype)
    if largest is None:
        assert not plan(0).fits
        return
    assert plan(largest).fits
    most = MAX_CONTEXT - extras["generated"]
    assert largest <= most and (largest == most or not plan(largest + 1).fits)


@pytest.mark.parametrize("context", [0, 1, 2, 12_345, 99_999, MAX_CONTEXT - 1])
@pytest.mark.parametrize("slack", [0, 65_535])
def test_the_largest_context_is_exact(context: int, slack: int) -> None:
    free = plan_memory(qwen("9B"), context, free_bytes=0, kv_dtypes=("f32",)).need_bytes + slack
    assert plan_memory(qwen("9B"), 5, free_bytes=free).largest_context("f32") == context


def test_largest_contexts_cover_every_kv_dtype() -> None:
    plan = plan_memory(qwen("27B"), 148_000, free_bytes=FREE, total_bytes=TOTAL)
    largest = plan.largest_contexts()
    assert set(largest) == set(DTYPE_BYTES)
    f32, f16, fp8 = (largest[name] for name in ("f32", "f16", "fp8_e4m3"))
    assert f32 is not None and f16 is not None and fp8 is not None
    assert largest["bf16"] == f16 and largest["fp8_e5m2"] == fp8 and f32 < f16 < 148_000 <= fp8
    assert plan_memory(qwen("27B", 16.0), 0, free_bytes=FREE).largest_context("fp8") is None


def test_a_window_caps_what_its_layers_keep() -> None:
    windowed = AttentionLayers(5, 4, 256, window=1024)
    model = ModelGeometry("gemma-like", 0, 8, (AttentionLayers(1, 4, 256), windowed))
    for tokens, kept in ((1, 1), (1023, 1023), (1024, 1024), (1025, 1024), (100_000, 1024)):
        assert model.kv_bytes("f16", tokens) == 4096 * tokens + 5 * 4096 * kept
    assert "20,480 B/token x 1,024 tokens" in plan_memory(model, 5000, free_bytes=FREE, kv_dtypes=("f16",)).arithmetic


def test_latent_attention_keeps_v_inside_k() -> None:
    latent = AttentionLayers(27, 1, 576, 512, v_in_k=True)
    assert latent.bytes_per_token("f16") == 31_104
    assert AttentionLayers(27, 16, 192, 128).bytes_per_token("f16") == 276_480


@pytest.mark.parametrize("field", ["layers", "num_kv_heads", "head_dim", "window"])
def test_layers_of_nothing_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected at least 1, got 0"):
        dataclasses.replace(AttentionLayers(1, 1, 64, window=4), **{field: 0})
