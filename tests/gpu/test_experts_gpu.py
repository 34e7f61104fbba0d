"""Mixtures of experts of published sizes on a GPU: the step's kernels and the grouped products against float64."""

from __future__ import annotations

import pytest
import torch

from splitkv.models.config import Experts
from splitkv.models.moe import FEW_TOKENS, ExpertMLP

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
