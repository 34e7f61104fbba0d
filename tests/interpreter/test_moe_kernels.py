"""A mixture of experts by the GPU's kernels, in the interpreter, against float64 and the same in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from helpers import same_bits

from splitkv.models.config import Experts
from splitkv.models.moe import ExpertMLP
from splitkv.models.moe_kernels import step

HIDDEN, TOKENS = 72, 3
PLAIN = Experts(16, 4, 40, 0, False, False, 1.0, 1, 1, frozenset())
KINDS = {
    "qwen3": replace(PLAIN, renormalise=True),
    "qwen3.5": replace(PLAIN, shared=1, gated=True, renormalise=True),
    "deepseek": replace(PLAIN, shared=2, scale=2.5),
    "groups": replace(PLAIN, shared=2, scale=16.0, groups=8, chosen_groups=3),
    "odd sizes": replace(PLAIN, count=13, chosen=5, width=7, shared=1),
    "one": replace(PLAIN, count=1, chosen=1),
    "as many as Qwen3.5": replace(PLAIN, count=256, chosen=8, width=16, shared=1, gated=True, renormalise=True),
    "as many as DeepSeek-V2": replace(PLAIN, count=160, chosen=6, width=16, shared=2, groups=8, chosen_groups=3),
    "all": replace(PLAIN, count=6, chosen=6, shared=3, gated=True),
}


def mixture(experts: Experts, dtype: torch.dtype) -> ExpertMLP:
    made = ExpertMLP(experts, HIDDEN, dtype, torch.device("cpu"))
    draw = torch.Generator().manual_seed(3)
    for weight in made.parameters():
        weight.normal_(0, 0.3, generator=draw)
    return made


def exact(layer: ExpertMLP, x: torch.Tensor) -> torch.Tensor:
    """In float64, one token and expert at a time."""
    experts, x = layer.experts, x.double()
    out = torch.zeros_like(x)
    for token, logits in enumerate(x @ layer.router.double().T):
        scores = logits[: experts.count].softmax(0)
        size = experts.count // experts.groups
        groups = sorted(range(experts.groups), key=lambda g: -float(scores[g * size : (g + 1) * size].max()))
        allowed = [e for e in range(experts.count) if e // size in groups[: experts.chosen_groups]]
        chosen = sorted(allowed, key=lambda e: -float(scores[e]))[: experts.chosen]
        total = sum(float(scores[e]) for e in chosen) if experts.renormalise else 1.0
        weights = {e: float(scores[e]) / total * experts.scale for e in chosen}
        own = float(logits[-1].sigmoid()) if experts.gated else 1.0
        weights |= {experts.count + i: own for i in range(experts.shared)}
        for e, weight in weights.items():
            gate, up = (layer.gate_up[e].double() @ x[token]).chunk(2)
            out[token] += weight * (layer.down[e].double() @ (gate * gate.sigmoid() * up))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_step(kind: str, dtype: torch.dtype) -> None:
    layer = mixture(KINDS[kind], dtype)
    x = torch.randn(TOKENS, HIDDEN + 8, generator=torch.Generator().manual_seed(4)).to(dtype)[:, :HIDDEN]
    expected = exact(layer, x)
    out = step(x, layer.router, layer.gate_up, layer.down, layer.experts)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    assert out.dtype == dtype and (out - expected).abs().max() < tolerance * expected.abs().max()
    plain = layer.decode(x)
    assert (plain - expected).abs().max() < 3 * tolerance * expected.abs().max()
    for token in range(TOKENS):  # a token's result has nothing to do with the others
        alone = step(x[token : token + 1], layer.router, layer.gate_up, layer.down, layer.experts)
        assert same_bits(alone[0], out[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norm_before_and_sum_behind(dtype: torch.dtype) -> None:
    layer = mixture(KINDS["qwen3.5"], dtype)
    draw = torch.Generator().manual_seed(4)
    x = 30 * torch.randn(TOKENS, HIDDEN + 8, generator=draw).to(dtype)
    weight, before = torch.randn(HIDDEN, generator=draw), x.clone()
    rows = x[:, :HIDDEN]
    exact_rows = rows.double()
    normed = exact_rows * torch.rsqrt(exact_rows.square().mean(-1, keepdim=True) + 0.1) * weight
    expected = exact_rows + exact(layer, normed)
    made = step(rows, layer.router, layer.gate_up, layer.down, layer.experts, norm=(weight, 0.1), add=True)
    assert made.data_ptr() == x.data_ptr() and torch.equal(x[:, HIDDEN:], before[:, HIDDEN:])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    assert (made - expected).abs().max() < tolerance * expected.abs().max()


def test_no_other_expert_is_read() -> None:
    layer = mixture(KINDS["qwen3.5"], torch.float32)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))
    expected = step(x, layer.router, layer.gate_up, layer.down, layer.experts)
    chosen = set(layer.route(x)[1].flatten().tolist())
    others = [e for e in range(layer.gate_up.shape[0]) if e not in chosen]
    assert others
    layer.gate_up[others] = layer.down[others] = float("nan")
    assert same_bits(step(x, layer.router, layer.gate_up, layer.down, layer.experts), expected)


def test_nan_stays_with_its_token() -> None:
    layer = mixture(KINDS["groups"], torch.float32)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))
    expected = step(x, layer.router, layer.gate_up, layer.down, layer.experts)
    x[1] = float("nan")
    out = step(x, layer.router, layer.gate_up, layer.down, layer.experts)
    assert out[1].isnan().all() and same_bits(out[[0, 2]], expected[[0, 2]])
