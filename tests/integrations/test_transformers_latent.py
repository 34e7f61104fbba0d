"""Latent attention decoded on the latents: eager's tokens, over transformers' caches and ours, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers_zoo import COMMON, ZOO, audit_flip, build, exactly, generate, prompt

import splitkv
from splitkv.integrations.transformers import SplitKVCache, absorb_latents

V3: dict[str, Any] = COMMON | dict(
    num_key_value_heads=4,
    kv_lora_rank=64,
    q_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=48,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)


CONFIGS = {  # latents of 512 + 64, as published, and of 64 + 16
    "deepseek-v2": ZOO["deepseek-v2"],
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**V3),
}


def models(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(as transformers made it, the same with absorbed latents)."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype, attn_implementation="eager")
    absorbed = copy.deepcopy(model.eval())
    assert absorb_latents(absorbed) == 2
    return model, absorbed


def cache_for(kind: str, config: Any, **options: Any) -> dict[str, Any]:
    if kind == "dynamic":
        return {}
    if kind == "static":
        return {"cache_implementation": "static"}
    return {"past_key_values": SplitKVCache(config, 64, page_size=5 if kind == "paged" else None, **options)}


@pytest.mark.parametrize("kind", ("dynamic", "static", "contiguous", "paged"))
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", (6, 20))
def test_greedy_tokens_are_those_of_eager(name: str, kind: str, length: int, calls: list[dict[str, Any]]) -> None:
    model, absorbed = models(name)
    ids = prompt(length, batch=3)
    mask = torch.ones_like(ids)
    if length == 20:
        mask[0, :9], mask[1, :2] = 0, 0
    want, want_logits = generate(model, "eager", ids, attention_mask=mask)
    got, got_logits = generate(absorbed, "splitkv", ids, attention_mask=mask, **cache_for(kind, model.config))
    assert audit_flip(model, ids, got, want, mask) <= 1e-4
    if torch.equal(got, want):
        assert (got_logits - want_logits).abs().max() <= 5e-5
    rank = model.config.kv_lora_rank
    assert {(call["k_cache"].shape[2:], call["v_cache"].shape[2:]) for call in calls} == {
        ((1, rank + model.config.qk_rope_head_dim), (1, rank))
    }


@pytest.mark.parametrize("page_size", (None, 5))
def test_our_rows_hold_each_latent_once(page_size: int | None, calls: list[dict[str, Any]]) -> None:
    _, absorbed = models("deepseek-v2")
    cache = SplitKVCache(absorbed.config, 60, page_size=page_size)
    generate(absorbed, "splitkv", prompt(20, batch=2), past_key_values=cache)
    assert cache.bytes == 2 * 2 * 60 * 576 * 4, "2 layers, 2 rows of 60 tokens"
    assert len({call["k_cache"].data_ptr() for call in calls}) == 2, "never copied"
    assert all(call["k_cache"].data_ptr() == call["v_cache"].data_ptr() for call in calls)


@pytest.mark.parametrize("page_size", (None, 5))
def test_beams_move_each_latent_once(page_size: int | None) -> None:
    model, absorbed = models("deepseek-v3")
    ids = prompt(20, batch=2)
    want, _ = generate(model, "eager", ids, num_beams=3)
    cache = SplitKVCache(model.config, 60, page_size=page_size)
    got, _ = generate(absorbed, "splitkv", ids, num_beams=3, past_key_values=cache)
    assert torch.equal(got, want)


def steps(model: Any, ids: Tensor, cache: Any) -> Tensor:
    model.set_attn_implementation("splitkv")
    with torch.no_grad():
        return torch.cat([model(chunk, past_key_values=cache).logits for chunk in ids.split((20, 18, 9, 25, 3), 1)], 1)


@pytest.mark.parametrize("kind", ("contiguous", "paged"))
def test_chunks_of_every_length(kind: str) -> None:
    model, absorbed = models("deepseek-v2")
    ids = prompt(75, batch=2)
    page_size = 5 if kind == "paged" else None
    got = steps(absorbed, ids, SplitKVCache(model.config, 80, page_size=page_size))
    assert (got - exactly(model, ids)).abs().max() <= 5e-5
    if kind == "contiguous":  # a model that still expands reads them too
        got = steps(model, ids, SplitKVCache(model.config, 80))
        assert (got - exactly(model, ids)).abs().max() <= 5e-5


@pytest.mark.parametrize("dtype", (torch.float16, torch.float8_e4m3fn), ids=str)
def test_latents_in_fewer_bits(dtype: torch.dtype) -> None:
    """Farther from float64 than float32 rows, and no farther than rounding 576 numbers a token explains."""
    model, absorbed = models("deepseek-v2")
    ids = prompt(75, batch=2)
    exact = exactly(model, ids)
    errors = [
        float((steps(absorbed, ids, cache) - exact).square().mean().sqrt())
        for cache in (SplitKVCache(model.config, 80), SplitKVCache(model.config, 80, dtype=dtype, page_size=16))
    ]
    assert errors[0] < errors[1] < 4 * torch.finfo(dtype).eps


def test_16_bit_models_are_near_float64() -> None:
    model, absorbed = models("deepseek-v2", torch.bfloat16)
    ids = prompt(75, batch=2)
    exact = exactly(model, ids)
    expanding, latent = (
        float((steps(m, ids, SplitKVCache(m.config, 80)) - exact).square().mean().sqrt()) for m in (model, absorbed)
    )
    assert latent <= 1.5 * expanding


def test_a_compiled_step_is_one_graph() -> None:
    model, absorbed = models("deepseek-v2")
    absorbed.set_attn_implementation("splitkv")
    ids = prompt(20, batch=2)
    exact = exactly(model, ids)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    torch._dynamo.reset()
    compiled = torch.compile(absorbed.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        absorbed(ids[:, :17], past_key_values=cache)
        got = torch.cat([compiled(ids[:, [i]], past_key_values=cache).logits for i in range(17, 20)], 1)
    assert (got - exact[:, 17:]).abs().max() <= 5e-5


def test_eager_cannot_run_an_absorbed_model_by_accident() -> None:
    _, absorbed = models("deepseek-v2")
    with pytest.raises(RuntimeError, match="Expected size"):
        generate(absorbed, "eager", prompt(20))


def test_what_has_no_latents_is_refused() -> None:
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got str"):
        absorb_latents("deepseek")  # type: ignore[arg-type]
    with pytest.raises(splitkv.UnsupportedError, match="model: supported are models.*got LlamaForCausalLM"):
        absorb_latents(build("llama"))
    model = models("deepseek-v2")[0]
    model.model.layers[0].self_attn.kv_b_proj = torch.nn.Linear(32, 1024)
    with pytest.raises(splitkv.UnsupportedError, match="without bias, got Linear"):
        absorb_latents(model)
    with pytest.raises(splitkv.UnsupportedError, match=r"v_scale: supported for latents.*k_scale 1\.0, got 0\.5"):
        SplitKVCache(model.config, 9, v_scale=0.5)
