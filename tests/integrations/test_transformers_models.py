"""Every kind of model decodes through splitkv to the tokens that transformers' eager attention gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers_zoo import ZOO, audit_flip, build, exactly, generate, prompt

FLIP_MARGIN = 1e-4  # float32 runs of these models part by 1e-5 in their logits
LOGIT_TOLERANCE = 5e-5
CACHES: dict[str, dict[str, Any]] = {"dynamic": {}, "static": {"cache_implementation": "static"}}


def left_padded(ids: Tensor) -> Tensor:
    """A 2-D mask that hides 9, 2 and 0 tokens at the rows' beginnings."""
    mask = torch.ones_like(ids)
    for row, hidden in enumerate((9, 2, 0)):
        mask[row, :hidden] = 0
    return mask


def assert_same_decoding(name: str, ids: Tensor, mask: Tensor | None = None, **options: Any) -> None:
    model = build(name)
    if mask is not None:
        options["attention_mask"] = mask
    want, want_logits = generate(model, "eager", ids, **options)
    got, got_logits = generate(model, "splitkv", ids, **options)
    assert audit_flip(model, ids, got, want, mask) <= FLIP_MARGIN
    if torch.equal(got, want):  # after a flip the two runs go on from different texts
        assert (got_logits - want_logits).abs().max() <= LOGIT_TOLERANCE
    assert len(want.unique()) > 10, "the model repeats itself, so the comparison shows little"


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ZOO)
def test_greedy_tokens_are_those_of_eager(name: str, cache: str, calls: list[dict[str, Any]]) -> None:
    assert_same_decoding(name, prompt(40, batch=2), **CACHES[cache])
    layers = len(calls) // 23
    assert len(calls) == 23 * layers > 0, "24 tokens are one prefill and 23 decode steps"
    assert all(call["mask"] is None for call in calls), "no mask over the keys is needed here"


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ZOO)
def test_left_padding_becomes_starts(name: str, cache: str, calls: list[dict[str, Any]]) -> None:
    ids = prompt(20, batch=3)
    assert_same_decoding(name, ids, left_padded(ids), **CACHES[cache])
    assert all(call["mask"] is None for call in calls)
    full = [call["starts"].tolist() for call in calls if call["seq_lens"][0] > 7]
    assert full == [[9, 2, 0]] * len(full), "layers without a window start at the first real token"


@pytest.mark.parametrize("name", ZOO)
def test_short_prompts_and_sampling(name: str) -> None:
    model, ids = build(name), prompt(5, batch=2)
    options = dict(do_sample=True, top_k=20, temperature=1.5)
    torch.manual_seed(3)
    want, _ = generate(model, "eager", ids, **options)
    torch.manual_seed(3)
    got, _ = generate(model, "splitkv", ids, **options)
    assert torch.equal(got, want)


def test_beams_reorder_the_cache() -> None:
    ids = prompt(20, batch=3)
    for name in ("llama", "gemma2"):
        options = dict(num_beams=3, attention_mask=left_padded(ids))
        want, _ = generate(build(name), "eager", ids, **options)
        got, _ = generate(build(name), "splitkv", ids, **options)
        assert torch.equal(got, want)


def test_a_static_cache_is_read_up_to_its_length(calls: list[dict[str, Any]]) -> None:
    model, ids = build("llama"), prompt(40, batch=2)
    generate(model, "splitkv", ids, cache_implementation="static", max_new_tokens=600, max_length=None)
    assert calls[0]["k_cache"].shape[1] == 639
    assert calls[0]["seq_lens"].tolist() == [41, 41] and calls[-1]["seq_lens"].tolist() == [639, 639]
    assert calls[0]["k_cache"].stride(1) < calls[0]["k_cache"].stride(2), "a view of heads-first rows, not a copy"


def forwards(name: str, implementation: str, ids: Tensor, chunks: list[int], dtype: torch.dtype) -> Tensor:
    """Logits of all but the first chunk, each chunk one forward over the cache of those before it."""
    model = build(name, dtype)
    model.set_attn_implementation(implementation)
    first, *rest = ids.split(chunks, dim=1)
    with torch.no_grad():
        cache = model(first, use_cache=True).past_key_values
        return torch.cat([model(chunk, past_key_values=cache).logits for chunk in rest], 1)


def assert_as_near_to_float64_as_eager(name: str, chunks: list[int], dtype: torch.dtype, slack: float) -> None:
    ids = prompt(sum(chunks), batch=2)
    exact = exactly(build(name, dtype), ids)[:, chunks[0] :]
    error = {
        implementation: float((forwards(name, implementation, ids, chunks, dtype) - exact).square().mean().sqrt())
        for implementation in ("eager", "splitkv")
    }
    assert error["splitkv"] <= 1.5 * error["eager"] + slack, error


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_16_bit_models_are_as_near_to_float64_as_eager(name: str, dtype: torch.dtype) -> None:
    assert_as_near_to_float64_as_eager(name, [32] + [1] * 8, dtype, slack=0.0)


@pytest.mark.parametrize("name", ZOO)
def test_prefill_in_chunks(name: str) -> None:
    """Long chunks after a cache: SDPA, or blocks of queries for softcap and sinks, under sdpa's own masks."""
    assert_as_near_to_float64_as_eager(name, [30, 45, 20], torch.float32, slack=1e-6)


def test_a_few_queries_at_once_are_decoded(calls: list[dict[str, Any]]) -> None:
    """Chunks of 2 to 16 tokens after a cache, as in speculative decoding: one call per layer, causal in itself."""
    model, ids = build("qwen3"), prompt(40, batch=2)
    model.set_attn_implementation("splitkv")
    with torch.no_grad():
        cache = model(ids[:, :24], use_cache=True).past_key_values
        got = model(ids[:, 24:], past_key_values=cache).logits
    assert [call["q"].shape[1] for call in calls] == [16, 16]
    assert (got - exactly(model, ids)[:, 24:]).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("length", (7, 20))
@pytest.mark.parametrize("kind", ("T5Config", "BartConfig"))
def test_encoder_decoders(kind: str, length: int, calls: list[dict[str, Any]]) -> None:
    """Encoders are not causal whatever their length; T5 adds a position bias; rows padded on the right are gaps."""
    sizes = dict(d_model=64, d_kv=16, d_ff=96, num_heads=4, num_layers=2, encoder_layers=2, decoder_layers=2)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96)
    tokens = dict(vocab_size=256, pad_token_id=0, decoder_start_token_id=1, eos_token_id=None, forced_eos_token_id=None)
    models = {}
    for implementation in ("eager", "splitkv"):
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**sizes, **heads, **tokens)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=implementation).eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.2)
        models[implementation] = model
    ids = prompt(length, batch=2)
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    options = dict(attention_mask=mask, max_new_tokens=20, do_sample=False, output_logits=True)
    want, got = (model.generate(ids, return_dict_in_generate=True, **options) for model in models.values())
    assert torch.equal(got.sequences, want.sequences)
    assert (torch.stack(got.logits) - torch.stack(want.logits)).abs().max() <= 5e-5
    assert len(calls) == 20 * 4, "self and cross attention of 2 layers; a decoder starts from one token"


def test_a_flip_is_measured_in_float64() -> None:
    model, ids = build("llama"), prompt(12)
    want, _ = generate(model, "eager", ids, max_new_tokens=4)
    logits = exactly(model, torch.cat((ids, want[:, :2]), 1))[0, -1]
    got = want.clone()
    got[0, 2] = logits.argsort()[-2]
    top = logits.sort().values
    assert audit_flip(model, ids, got, want) == pytest.approx(float(top[-1] - top[-2]), rel=1e-6)
    assert audit_flip(model, ids, want, want) == 0.0
