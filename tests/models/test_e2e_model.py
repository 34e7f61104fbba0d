"""The random models and contexts of `splitkv bench e2e`, and its checks, on a shrunk Qwen3.5 on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.bench.e2e_checks import (
    OtherAttention,
    Runs,
    attended_by,
    audit_flips,
    exact_attention,
    logits_difference,
    plain_attention,
)
from splitkv.bench.e2e_model import (
    Prompt,
    fill,
    first_tokens,
    make_prompt,
    prompt_stops,
    random_weights,
    rewind,
)
from splitkv.models.config import DecoderConfig
from splitkv.models.decoder import Decoder
from splitkv.models.geometries import geometry_config
from splitkv.models.loop import DecodeLoop
from splitkv.models.state import DecodeState

SHRUNK = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
CAPACITY, PROMPT, STEPS = 200, 40, 12


def shrunk(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(DecoderConfig.from_config(geometry_config(name) | SHRUNK, name), dtype, "cpu")
    random_weights(decoder, 3)
    return decoder


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return shrunk("qwen3.5-9b")


@pytest.fixture(scope="module")
def prompt(decoder: Decoder) -> Prompt:
    return make_prompt(decoder, [PROMPT], 3)


def filled(
    decoder: Decoder, prompt: Prompt, batch: int = 2, kv_dtype: str = "f32", room: int = CAPACITY
) -> DecodeState:
    state = DecodeState(decoder.config, batch, room, kv_dtype, decoder.dtype, decoder.device)
    fill(state, prompt, 3)
    return state


def decoded(decoder: Decoder, state: DecodeState, prompt: Prompt, depth: int) -> Tensor:
    """Tokens [steps, batch] from a depth on."""
    rewind(state, prompt, depth)
    tokens, found = first_tokens(state.batch, decoder.config.vocab_size, decoder.device), []
    for _ in range(STEPS):
        tokens = decoder.decode(tokens, state).argmax(-1)
        found.append(tokens)
    return torch.stack(found)


# ---- weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3.5-0.8b", "qwen2.5-0.5b"])
def test_random_weights_give_logits_of_some_size_and_tokens_that_vary(name: str, dtype: torch.dtype) -> None:
    decoder = shrunk(name, dtype)
    prompt = make_prompt(decoder, [PROMPT], 3)
    state = filled(decoder, prompt, 3, "f32" if dtype == torch.float32 else "bf16")
    rewind(state, prompt, 150)
    logits = decoder.decode(first_tokens(3, 1000, decoder.device), state)
    assert bool(logits.isfinite().all()) and 0.05 < float(logits.std()) < 3
    tokens = decoded(decoder, state, prompt, 150)
    assert tokens.unique().numel() > STEPS  # three rows that go their own ways, and do not repeat one token
    assert float((tokens[1:] == tokens[:-1]).float().mean()) < 0.2


def test_weights_follow_the_seed(decoder: Decoder) -> None:
    again = shrunk("qwen3.5-9b")
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))
    random_weights(again, 4)
    assert not torch.equal(decoder.embedding, again.embedding)


def test_what_attention_sees_changes_the_logits(decoder: Decoder, prompt: Prompt) -> None:
    """Else no token could tell one way of attending from another."""
    state = filled(decoder, prompt)
    first = first_tokens(2, 1000, decoder.device)
    rewind(state, prompt, 150)
    logits = decoder.decode(first, state)
    for cache in state.caches.values():
        cache.v_cache[:, PROMPT:150] = 0
    rewind(state, prompt, 150)
    assert float((decoder.decode(first, state) - logits).abs().max()) > 0.02 * float(logits.std())


# ---- prompt and random keys --------------------------------------------------------------------------------


def test_a_stop_of_the_prefill_is_a_prompt_of_that_length(decoder: Decoder) -> None:
    """Decoding from it is decoding after the loop's own prefill of the same tokens."""
    depth = 23
    prompt = make_prompt(decoder, [depth, PROMPT], 3)
    assert prompt.label(depth) == prompt.label(PROMPT) == "prefilled" and prompt.label(PROMPT + 1) == "filled"
    state = filled(decoder, prompt, 1)
    ids = torch.randint(1000, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    loop = DecodeLoop(decoder, DecodeState(decoder.config, 1, CAPACITY, "f32", decoder.dtype, "cpu"), graph=False)
    loop.prefill(ids[:depth])
    first = first_tokens(1, 1000, decoder.device)
    rewind(state, prompt, depth)
    ours, theirs = decoder.decode(first, state), decoder.decode(first, loop.state)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_where_no_depth_is_within_reach_a_short_prompt_must_do() -> None:
    assert prompt_stops({4096, 20_000, 60_000}, 20_000) == [4096, 20_000]
    assert prompt_stops({4096}, 512) == [512]


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("f32", 0), ("f16", 1e-3), ("fp8_e4m3", 0.07)])
def test_rows_are_filled_alike_whatever_the_batch_the_capacity_and_the_dtype(
    decoder: Decoder, prompt: Prompt, kv_dtype: str, tolerance: float
) -> None:
    reference, other = filled(decoder, prompt), filled(decoder, prompt, 3, kv_dtype, CAPACITY + 5000)
    for layer, cache in reference.caches.items():
        for name in ("k_cache", "v_cache"):
            expected, got = getattr(cache, name), getattr(other.caches[layer], name)[:2, :CAPACITY].float()
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance / 10)
            assert not torch.equal(expected[0, PROMPT:], expected[1, PROMPT:])
            assert torch.equal(expected[0, :PROMPT], expected[1, :PROMPT])
            assert float(expected[:, PROMPT:].std()) == pytest.approx(3.0 if name == "k_cache" else 1.0, rel=0.05)


def test_rows_set_back_decode_the_same_again(decoder: Decoder, prompt: Prompt) -> None:
    """Deepest first, as a run leaves keys of its own behind its depth."""
    state = filled(decoder, prompt)
    for depth in (150, 100, PROMPT):
        tokens = decoded(decoder, state, prompt, depth)
        assert torch.equal(decoded(decoder, state, prompt, depth), tokens)
        assert torch.equal(decoded(decoder, filled(decoder, prompt), prompt, depth), tokens)


# ---- checks ------------------------------------------------------------------------------------------------


class Disturbed:
    """Attention whose result is multiplied by a random factor near 1, larger or smaller in each element."""

    def __init__(self, attention: splitkv.DecodeAttention, size: float) -> None:
        self.attention, self.size = attention, size
        self.generator = torch.Generator().manual_seed(1)

    def run(self, *arguments: Any, **options: Any) -> Tensor:
        out = self.attention.run(*arguments, **options)
        assert isinstance(out, Tensor)
        return out * (1 + self.size * torch.randn(out.shape, generator=self.generator))


@pytest.mark.parametrize(("attend", "bound"), [(exact_attention, 1e-4), (plain_attention, 1e-4)])
def test_the_attentions_beside_ours_agree_with_it(decoder: Decoder, prompt: Prompt, attend: Any, bound: float) -> None:
    state = filled(decoder, prompt)
    first = first_tokens(2, 1000, decoder.device)
    logits = []
    for way in (state, attended_by(state, OtherAttention(attend))):
        rewind(way, prompt, 150)
        logits.append(decoder.decode(first, way))
    assert 0 <= float((logits[0] - logits[1]).abs().max()) < bound


def test_other_attention_refuses_what_it_does_not_know(decoder: Decoder, prompt: Prompt) -> None:
    other = attended_by(filled(decoder, prompt), OtherAttention(exact_attention)).attention
    q, k = torch.zeros(2, 4, 32), torch.zeros(2, 8, 2, 32)
    with pytest.raises(ValueError, match="options: expected .* got {'softcap': 5.0}"):
        other.run(q, k, k, torch.tensor([8, 8]), softcap=5.0, sinks=None, k_scale=1.0)


@pytest.mark.parametrize(("window", "scale"), [(None, None), (5, None), (None, 0.3)])
@pytest.mark.parametrize("attend", [exact_attention, plain_attention])
def test_other_attention_is_the_reference(attend: Any, window: int | None, scale: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, generator=generator) for shape in ((2, 4, 32), (2, 20, 2, 32), (2, 20, 2, 16)))
    lens = torch.tensor([17, 17], dtype=torch.int32)
    options: dict[str, Any] = {"window": window, "softmax_scale": scale}
    expected = splitkv.reference_attention(q, k, v, lens, **options)
    torch.testing.assert_close(
        OtherAttention(attend).run(q, k, v, lens, **options).double(), expected, rtol=0, atol=1e-5
    )


def audited(decoder: Decoder, prompt: Prompt, disturbance: float) -> list[dict[str, Any]]:
    """The audit of a run whose unsplit attention is off by that much."""
    split = filled(decoder, prompt)
    unsplit = attended_by(split, Disturbed(split.attention, disturbance))  # type: ignore[arg-type]
    first = first_tokens(2, 1000, decoder.device)
    runs = Runs(first, decoded(decoder, split, prompt, 150), decoded(decoder, unsplit, prompt, 150))
    loops = (DecodeLoop(decoder, state, graph=False) for state in (split, unsplit))
    return audit_flips(*loops, runs, partial(rewind, split, prompt, 150))


def test_a_wrong_attention_flips_tokens_and_cannot_explain_them(decoder: Decoder, prompt: Prompt) -> None:
    """Its own large error would reach over any margin, but is not like PyTorch's."""
    flips = audited(decoder, prompt, 0.8)
    earliest = min(flip["step"] for flip in flips)
    assert all(flip["split_token"] != flip["unsplit_token"] for flip in flips)
    for flip in flips:
        if flip["step"] > earliest:
            assert flip["explained"] is None
            continue
        assert flip["explained"] is False
        assert flip["unsplit_rms"] > flip["rms_allowed"] > flip["split_rms"]
        assert flip["float64_token"] == flip["split_token"]


def test_a_flip_over_a_narrow_margin_is_explained(decoder: Decoder, prompt: Prompt) -> None:
    """Two tokens made to have all but equal logits: rounding decides between them, and may."""
    state = filled(decoder, prompt)
    first = first_tokens(2, 1000, decoder.device)
    rewind(state, prompt, 150)
    logits = decoder.decode(first, state)
    best, rival = int(logits[0].argmax()), int(logits[0].topk(2).indices[1])
    head = decoder.head.clone()
    try:
        decoder.head[rival] = decoder.head[best]
        runs = Runs(first, torch.tensor([[best, 5]]), torch.tensor([[rival, 5]]))
        loop = DecodeLoop(decoder, state, graph=False)
        (flip,) = audit_flips(loop, loop, runs, partial(rewind, state, prompt, 150))
    finally:
        decoder.head.copy_(head)
    assert flip["explained"] and flip["margin"] == 0 and (flip["row"], flip["step"]) == (0, 0)


def test_equal_runs_have_nothing_to_audit(decoder: Decoder, prompt: Prompt) -> None:
    assert audited(decoder, prompt, 0.0) == []


def test_flips_are_the_first_of_each_row() -> None:
    split = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    unsplit = torch.tensor([[1, 2, 3], [4, 0, 6], [0, 0, 9]])
    assert Runs(split[0], split, unsplit).flips == [(0, 2), (1, 1)]


def test_difference_of_logits_tells_size_and_token() -> None:
    reference = torch.tensor([[0.0, 3.0, 4.0], [5.0, 1.0, 0.0]])
    moved = reference + torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    found = logits_difference(moved, reference)
    assert found["max_abs"] == 2 and found["margin"] == 1 and not found["same_token"]
    assert logits_difference(reference, reference) == pytest.approx(
        {"max_abs": 0, "relative": 0, "cosine": 1, "same_token": True, "margin": 1}
    )
