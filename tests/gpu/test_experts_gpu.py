"""Mixtures of experts of published sizes on a GPU: the step's kernels and the grouped products against float64."""

from __future__ import annotations

import pytest
import torch

from splitkv.models import latent_kernels, moe_kernels, place_kernels, product_kernels, step_kernels
from splitkv.models.config import DecoderConfig, Experts
from splitkv.models.decoder import Decoder
from splitkv.models.loop import DecodeLoop
from splitkv.models.moe import FEW_TOKENS, ExpertMLP
from splitkv.models.state import DecodeState

SIZES = {
    "Qwen3.5-35B-A3B": (2048, Experts(256, 8, 512, 1, True, True, 1.0, 1, 1, frozenset())),
    "DeepSeek-V2-Lite": (2048, Experts(64, 6, 1408, 2, False, False, 1.0, 1, 1, frozenset())),
    "groups": (1024, Experts(160, 6, 256, 2, False, False, 16.0, 8, 3, frozenset())),
}


@pytest.fixture(scope="module", params=SIZES)
def mixture(request: pytest.FixtureRequest) -> ExpertMLP:
    hidden, experts = SIZES[request.param]
    made = ExpertMLP(experts, hidden, torch.bfloat16, torch.device("cuda"))
    draw = torch.Generator("cuda").manual_seed(3)
    for weight in made.parameters():
        weight.normal_(0, 0.05, generator=draw)
    return made


def inputs(layer: ExpertMLP, tokens: int) -> torch.Tensor:
    draw = torch.Generator("cuda").manual_seed(4)
    return torch.randn(tokens, layer.down.shape[1], generator=draw, device="cuda").to(torch.bfloat16)


def exact(layer: ExpertMLP, x: torch.Tensor) -> torch.Tensor:
    weights, ids = layer.route(x)
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for token in range(len(x)):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate, up = (layer.gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (layer.down[expert].double() @ (gate * gate.sigmoid() * up))
    return out


@pytest.mark.parametrize("tokens", [1, 3, FEW_TOKENS, FEW_TOKENS + 1])
def test_a_step(mixture: ExpertMLP, tokens: int) -> None:
    x = inputs(mixture, tokens)
    expected = exact(mixture, x)
    error = (mixture.decode(x) - expected).abs().max()
    plain = (mixture.one_by_one(x, *mixture.route(x)) - expected).abs().max()
    assert error <= 2 * plain and plain < 0.02 * expected.abs().max()


def test_many_tokens(mixture: ExpertMLP) -> None:
    x = inputs(mixture, 700)
    ours, plain = mixture.prefill(x), mixture.one_by_one(x, *mixture.route(x))
    expected = exact(mixture, x[:24])
    assert (ours[:24] - expected).abs().max() <= 2 * (plain[:24] - expected).abs().max()
    assert (ours - plain).abs().max() < 0.02 * plain.abs().max()


@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, 2 * FEW_TOKENS])
def test_a_graph_chooses_anew(mixture: ExpertMLP, tokens: int) -> None:
    """Captured with one input, replayed with another: other experts, and nothing waits for the host."""
    x, other = inputs(mixture, 2 * tokens).chunk(2)
    given = x.clone()
    mixture.decode(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture.decode(given)
    given.copy_(other)
    graph.replay()
    assert torch.equal(out, mixture.decode(other)) and not torch.equal(out, mixture.decode(x))


def test_a_row_is_the_same_in_any_batch(mixture: ExpertMLP) -> None:
    x = inputs(mixture, FEW_TOKENS)
    together = mixture.decode(x)
    for row in range(FEW_TOKENS):
        assert torch.equal(mixture.decode(x[row : row + 1])[0], together[row])


LITE = {
    "model_type": "deepseek_v2", "vocab_size": 4000, "hidden_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 4096, "moe_intermediate_size": 1408,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.fixture(scope="module", params=[None, 768], ids=["whole query", "squeezed query"])
def lite(request: pytest.FixtureRequest) -> Decoder:
    made = Decoder(DecoderConfig.from_config(LITE | {"q_lora_rank": request.param}, "test"), torch.bfloat16, "cuda")
    made.randomise(3)
    return made


def filled(decoder: Decoder, rows: int, graph: bool) -> DecodeLoop:
    state = DecodeState(decoder.config, rows, 128, "bf16", torch.bfloat16, "cuda")
    made = DecodeLoop(decoder, state, graph=graph)
    for row in range(rows):
        made.prefill([i * 37 % 4000 for i in range(row, 50)], row)
    return made


@pytest.mark.parametrize("rows", [1, 3])
def test_kernels_that_begin_early_read_nothing_too_early(
    rows: int, lite: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty steps of a graph whose kernels overlap equal thirty steps of kernels that wait for each other."""
    graph, waiting = filled(lite, rows, graph=True), filled(lite, rows, graph=False)
    for module in (latent_kernels, moe_kernels, place_kernels, product_kernels, step_kernels):
        monkeypatch.setattr(module, "dependent_launch", lambda _: (False, {}))
    for _ in range(30):
        graph.step()
        waiting.step()
        assert torch.equal(graph.tokens, waiting.tokens)
    for layer, cache in waiting.state.caches.items():
        held = slice(0, 80 - rows)
        assert torch.equal(graph.state.caches[layer].k_cache[:, held], cache.k_cache[:, held])


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_a_steps_first_latents_are_those_of_torch(rows: int, lite: Decoder) -> None:
    """Of the first layers, before an expert chosen otherwise in bf16 can make a difference."""
    ours, plain = filled(lite, rows, graph=False), filled(lite, rows, graph=False)
    lite.decode(ours.tokens, ours.state)
    kind, lite.step = lite.step, "torch"
    try:
        lite.decode(ours.tokens, plain.state)
    finally:
        lite.step = kind
    for layer in (0, 1):
        for row in range(rows):
            place = 50 - row
            a, b = (state.caches[layer].k_cache[row, place, 0].float() for state in (ours.state, plain.state))
            assert (a - b).abs().max() < 0.03 * b.abs().max() and b.abs().max() > 0
