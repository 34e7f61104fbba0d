"""A decode step by the GPU's kernels, in the interpreter, against the same step in torch, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from splitkv import ContiguousKVCache
from splitkv.models.config import KINDS, DecoderConfig
from splitkv.models.decoder import Decoder
from splitkv.models.place_kernels import place
from splitkv.models.state import DecodeState

SIZES = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    "qwen3_5": {
        "head_dim": 32, "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
    },
    "qwen3_5_moe": {
        "head_dim": 32, "num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "num_experts": 3,
        "num_experts_per_tok": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {"head_dim": 32, "num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    "deepseek_v2": {
        "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 12,
        "n_routed_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
"""Experts are all chosen: which are is test_moe_kernels.py's, and a near tie may fall either way in f16."""
CAPACITY, STEPS = 16, 3


def decoder(family: str, dtype: torch.dtype) -> Decoder:
    name = f"{family}_text" if family.startswith("qwen3_5") else family
    config = DecoderConfig.from_config({**SIZES, **FAMILIES[family], "model_type": name}, family)
    made = Decoder(config, dtype, "cpu")
    draw = torch.Generator().manual_seed(11)
    for part in made.parts():
        part.dest.normal_(0, 0.2, generator=draw)
        if part.name.endswith("norm.weight"):
            part.dest.add_(1.0)
        elif part.name.endswith("A_log"):
            part.dest.copy_(-part.dest.abs() - 0.1)
    return made


def states(made: Decoder, rows: int, kv_dtype: str) -> list[DecodeState]:
    """Two alike, whose rows hold 0, 1, 2, .. tokens of random keys and memories."""
    pair = [DecodeState(made.config, rows, CAPACITY, kv_dtype, made.dtype, "cpu") for _ in range(2)]
    for state in pair:
        draw = torch.Generator().manual_seed(12)
        state.seq_lens.copy_(torch.arange(rows))
        for cache in state.caches.values():
            cache.seq_lens.copy_(state.seq_lens)
            for stored in (cache.k_cache, cache.v_cache):
                stored.copy_(torch.randn(stored.shape, generator=draw))
        for store in (*state.conv.values(), *state.memory.values()):
            store.normal_(generator=draw)
    return pair


def assert_same(ours: DecodeState, theirs: DecodeState, tolerance: float) -> None:
    assert torch.equal(ours.seq_lens, theirs.seq_lens)
    for layer, cache in ours.caches.items():
        other = theirs.caches[layer]
        assert torch.equal(cache.seq_lens, other.seq_lens) and torch.equal(cache.dropped, other.dropped)
        for name in ("k_cache", "v_cache"):
            a, b = getattr(cache, name).float(), getattr(other, name).float()
            assert (a - b).abs().max() <= tolerance * b.abs().max(), name
    for name in ("conv", "memory"):
        for layer, store in getattr(ours, name).items():
            other = getattr(theirs, name)[layer].float()
            assert (store.float() - other).abs().max() <= tolerance * other.abs().max(), name


@pytest.mark.parametrize("step", ["fused", "streamed"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "f32"), ("float16", "f16")])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_states_are_those_of_torch(family: str, dtype: str, kv_dtype: str, rows: int, step: str) -> None:
    made = decoder(family, getattr(torch, dtype))
    ours, theirs = states(made, rows, kv_dtype)
    tokens = torch.randint(0, SIZES["vocab_size"], (STEPS, rows), generator=torch.Generator().manual_seed(13))
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    for given in tokens:
        made.step = "torch"
        expected = made.decode(given, theirs)
        made.step = step
        logits = made.decode(given, ours)
        assert logits.dtype == torch.float32
        assert (logits - expected).abs().max() < tolerance * expected.abs().max()
        assert_same(ours, theirs, tolerance)


def test_every_family_has_a_case() -> None:
    assert set(FAMILIES) | {"gemma2", "gemma3"} == set(KINDS)  # Gemma's step is torch's


def test_a_full_row_drops_its_token_and_counts_it() -> None:
    made = decoder("qwen3", torch.float32)
    ours, theirs = states(made, 2, "f32")
    for state in (ours, theirs):
        for lens in (state.seq_lens, *(cache.seq_lens for cache in state.caches.values())):
            lens.copy_(torch.tensor([3, CAPACITY]))
    made.decode(torch.tensor([1, 2]), theirs)
    made.step = "streamed"
    made.decode(torch.tensor([1, 2]), ours)
    assert_same(ours, theirs, 2e-5)
    assert ours.caches[0].dropped.tolist() == [0, 1]


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16], ids=str)
def test_keys_and_values_are_stored_as_append_does(stored: torch.dtype) -> None:
    """Without norms and at position 0 nothing is changed on the way: the bytes are append's, others stay."""
    heads, kv_heads, dim, rows = 3, 3, 48, 2
    caches = [ContiguousKVCache(rows, 4, kv_heads, dim, dtype=stored, device="cpu") for _ in range(2)]
    for cache in caches:
        cache.k_cache.view(torch.uint8).fill_(1)
        cache.v_cache.view(torch.uint8).fill_(1)
    projected = 100 * torch.randn(rows, 3 * heads * dim, generator=torch.Generator().manual_seed(1)).half()
    projected[0, 60:90] *= 1e-3
    q, k, v = projected.unflatten(-1, (3, heads, dim)).unbind(1)
    caches[0].append(k, v)
    rotation = torch.ones(rows, 1, dim // 2), torch.zeros(rows, 1, dim // 2)
    out, gate = place(projected, None, rotation, torch.zeros(rows, dtype=torch.int32), caches[1], heads, gated=False)
    assert gate is None and torch.equal(out, q) and caches[1].seq_lens.tolist() == [1, 1]
    for name in ("k_cache", "v_cache"):
        ours, theirs = (getattr(cache, name).view(torch.uint8) for cache in caches)
        assert torch.equal(ours, theirs), name
