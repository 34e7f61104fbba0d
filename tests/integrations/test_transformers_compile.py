"""The decode step under torch.compile: one graph, the eager step's logits, whatever the length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers_zoo import build, exactly, generate, prompt

from splitkv.integrations.transformers import SplitKVCache

CAPACITY = 64


def decode_steps(model: Any, forward: Any, ids: Tensor, padding: Tensor | None, steps: int = 4) -> Tensor:
    """Logits of greedy steps after a prefill, over a static cache."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=CAPACITY)
    with torch.no_grad():
        logits = [model(ids, attention_mask=padding, past_key_values=cache).logits[:, -1:]]
        for step in range(steps):
            mask = None
            if padding is not None:
                mask = torch.zeros(ids.shape[0], CAPACITY, dtype=torch.long)
                mask[:, : ids.shape[1]], mask[:, ids.shape[1] : ids.shape[1] + step + 1] = padding, 1
            token = logits[-1].argmax(-1)
            logits.append(forward(token, attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(logits, 1)


def compiled_whole(model: Any) -> tuple[Any, list[Any]]:
    """(the forward, which compiles without a break or raises; the graphs it has made so far)."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(model.forward, fullgraph=True, backend=backend), graphs


@pytest.mark.parametrize("padded", (False, True), ids=("unpadded", "left-padded"))
@pytest.mark.parametrize("name", ("llama", "qwen3.5", "mistral-window", "gpt-oss"))
def test_a_compiled_step_is_one_graph_with_eagers_logits(name: str, padded: bool) -> None:
    model, ids = build(name), prompt(12, batch=2)
    padding = None
    if padded:
        padding = torch.ones_like(ids)
        padding[0, :5] = 0
    model.set_attn_implementation("eager")
    want = decode_steps(model, model, ids, padding)
    model.set_attn_implementation("splitkv")
    compiled, graphs = compiled_whole(model)
    got = decode_steps(model, compiled, ids, padding)
    assert (got - want).abs().max() <= 5e-5
    assert all("splitkv.decode_attention" in graph.code for graph in graphs)
    if name in ("llama", "qwen3.5"):  # transformers' static window layers guard on their length
        assert len(graphs) == 1


@pytest.mark.parametrize("page_size", (None, 5))
@pytest.mark.parametrize("name", ("qwen3", "gemma3"))
def test_a_compiled_step_over_our_rows(name: str, page_size: int | None) -> None:
    """The first step and all later ones: the host counts tokens, which the second graph takes as a variable."""
    model, ids = build(name), prompt(30, batch=2)
    model.set_attn_implementation("splitkv")
    compiled, graphs = compiled_whole(model)
    cache = SplitKVCache(model.config, CAPACITY, page_size=page_size)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        got = torch.cat([compiled(ids[:, [i]], past_key_values=cache).logits for i in range(20, 30)], 1)
    assert (got - exactly(model, ids)[:, 20:]).abs().max() <= 5e-5
    assert len(graphs) == 2 and all("splitkv.decode_attention" in graph.code for graph in graphs)


def test_generate_compiles_its_decode_step() -> None:
    model, ids = build("qwen3"), prompt(20, batch=2)
    want, _ = generate(model, "eager", ids, cache_implementation="static", max_new_tokens=8)
    config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    got, _ = generate(model, "splitkv", ids, cache_implementation="static", max_new_tokens=8, compile_config=config)
    assert torch.equal(got, want)
    assert counters["stats"]["unique_graphs"] == 1
