"""The transformers integration on a GPU: tokens, static caches compiled by generate, and a captured decode step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers_zoo import ZOO, build, generate, prompt

from splitkv.integrations.transformers import SplitKVCache, absorb_latents, register

LATENT = "deepseek-v2"


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def on_gpu(name: str, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    model = copy.deepcopy(build(name, dtype)).to("cuda")  # build keeps its models for the CPU's tests
    model.set_experts_implementation("eager")  # the others take no float32 on every GPU
    return model, prompt(40, batch=2).to("cuda")


def assert_same_until_a_tie(
    got: torch.Tensor, want: torch.Tensor, got_logits: torch.Tensor, want_logits: torch.Tensor, tolerance: float
) -> None:
    """Logits agree at every step up to the first different token, so that one is a tie within the tolerance."""
    for row in range(got.shape[0]):
        parts = (got[row] != want[row]).nonzero()
        steps = got.shape[1] if len(parts) == 0 else int(parts[0]) + 1
        assert (got_logits[row, :steps] - want_logits[row, :steps]).abs().max() <= tolerance
        assert steps > 1


@pytest.mark.parametrize("cache", ("dynamic", "static", "contiguous", "paged"))
@pytest.mark.parametrize("name", ZOO)
def test_float32_tokens_are_those_of_eager(name: str, cache: str) -> None:
    model, ids = on_gpu(name, torch.float32)
    want, want_logits = generate(model, "eager", ids, disable_compile=True)
    options: dict[str, Any] = {"disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    elif cache != "dynamic":
        page_size = 16 if cache == "paged" else None
        if name == LATENT:
            absorb_latents(model)
        options["past_key_values"] = SplitKVCache(model.config, 64, page_size=page_size)
    got, got_logits = generate(model, "splitkv", ids, **options)
    # flash-linear-attention, where installed, multiplies in TF32: a last bit of its input may move its output by 1e-3.
    assert_same_until_a_tie(got, want, got_logits, want_logits, 1e-2 if name == "qwen3.5" else 2e-4)


def test_generate_compiles_a_static_cache_step() -> None:
    model, ids = on_gpu("qwen3", torch.bfloat16)
    options: dict[str, Any] = dict(cache_implementation="static", max_new_tokens=12)
    want, want_logits = generate(model, "splitkv", ids, disable_compile=True, **options)
    got, got_logits = generate(model, "splitkv", ids, **options)  # reduce-overhead: CUDA graphs
    assert_same_until_a_tie(got, want, got_logits, want_logits, 0.25)  # the compiler rounds to bf16 less often


@pytest.mark.parametrize("page_size", (None, 16))
@pytest.mark.parametrize("name", ("qwen3", "gemma2", "qwen3.5", LATENT))
def test_a_captured_step_replays_as_the_text_grows(name: str, page_size: int | None) -> None:
    model, ids = on_gpu(name, torch.bfloat16)
    model.set_attn_implementation("splitkv")
    if name == LATENT:
        absorb_latents(model)
        model.set_experts_implementation("batched_mm")  # eager's loop over experts waits for the GPU

    def greedy(replayed: bool) -> list[list[int]]:
        cache = SplitKVCache(model.config, 128, page_size=page_size)
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        position = torch.full((1, 1), ids.shape[1], device="cuda")
        graph, tokens = torch.cuda.CUDAGraph(), [token[:, 0].tolist()]

        def step() -> None:
            logits = model(token, position_ids=position, past_key_values=cache).logits
            token.copy_(logits[:, -1:].argmax(-1))
            position.add_(1)

        for number in range(20):
            if replayed and number == 3:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    step()
            if replayed and number >= 3:
                graph.replay()
            else:
                step()
            tokens.append(token[:, 0].tolist())
        return tokens

    with torch.no_grad():
        assert greedy(replayed=True) == greedy(replayed=False)
