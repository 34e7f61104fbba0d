"""The decode step's kernels on a GPU: bf16 against float64, and one kind of step against another."""

from __future__ import annotations

import pytest
import torch

from splitkv.models import delta_kernels, place_kernels, product_kernels, step_kernels
from splitkv.models.config import DecoderConfig
from splitkv.models.decoder import Decoder
from splitkv.models.loop import DecodeLoop
from splitkv.models.product_kernels import product
from splitkv.models.state import DecodeState

SIZES = {
    "model_type": "qwen3_5_text", "vocab_size": 5000, "hidden_size": 1024, "intermediate_size": 3584,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
PROMPT = [i * 37 % 5000 for i in range(50)]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    made = Decoder(DecoderConfig.from_config(dict(SIZES), "test"), torch.bfloat16, "cuda")
    made.randomise(3)
    return made


def loop(decoder: Decoder, step: str, rows: int, graph: bool) -> DecodeLoop:
    decoder.step = step
    state = DecodeState(decoder.config, rows, 128, "bf16", torch.bfloat16, "cuda")
    made = DecodeLoop(decoder, state, graph=graph)
    for row in range(rows):
        made.prefill(PROMPT[row:], row)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1000, 9000])
@pytest.mark.parametrize("paired", [False, True])
def test_products(paired: bool, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(1, 4096, device="cuda", dtype=dtype)
    weight = torch.randn((2 * size if paired else size), 4096, device="cuda", dtype=dtype)
    exact = x.double() @ weight.double().T
    if paired:
        gate, up = exact.chunk(2, -1)
        exact = gate * gate.sigmoid() * up
    out = product(x, weight, torch.full((1, size), torch.nan, device="cuda", dtype=dtype), paired=paired)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert (out - exact).abs().max() < tolerance * exact.abs().max()


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("step", ["fused", "streamed"])
def test_logits_are_those_of_torch(step: str, rows: int, decoder: Decoder) -> None:
    plain = loop(decoder, "torch", rows, graph=False)
    ours = loop(decoder, step, rows, graph=False)
    for token in range(10):
        given = torch.full((rows,), token, device="cuda")
        decoder.step = "torch"
        expected = decoder.decode(given, plain.state)
        decoder.step = step
        assert (decoder.decode(given, ours.state) - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("rows", [1, 3])
def test_kernels_that_begin_early_read_nothing_too_early(
    rows: int, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty steps of a graph whose kernels overlap equal thirty steps of kernels that wait for each other."""
    graph, waiting = loop(decoder, "streamed", rows, graph=True), loop(decoder, "streamed", rows, graph=False)
    for module in (delta_kernels, place_kernels, product_kernels, step_kernels):
        monkeypatch.setattr(module, "dependent_launch", lambda _: (False, {}))
    for _ in range(30):
        graph.step()
        waiting.step()
        assert torch.equal(graph.tokens, waiting.tokens)
    for layer, memory in waiting.state.memory.items():
        assert torch.equal(graph.state.memory[layer], memory)
        assert torch.equal(graph.state.conv[layer], waiting.state.conv[layer])
