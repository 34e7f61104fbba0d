"""The decode step's kernels on a GPU: bf16 against float64, and one kind of step against another."""

from __future__ import annotations

import pytest
import torch

from splitkv.models import (
    cuda_product,
    delta_kernels,
    place_kernels,
    product_kernels,
    sampling_kernels,
    step_kernels,
)
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


def kernels_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every kernel begins when the one before it has ended."""
    for module in (cuda_product, delta_kernels, place_kernels, product_kernels, sampling_kernels, step_kernels):
        monkeypatch.setattr(module, "dependent_launch", lambda _: (False, {}))


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


@pytest.fixture(scope="module")
def wide_decoder() -> Decoder:
    """Products of so many weights that a block's stages are filled again and again."""
    wide = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 4, "num_attention_heads": 16}
    wide |= {"num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
    made = Decoder(DecoderConfig.from_config(SIZES | wide, "test"), torch.bfloat16, "cuda")
    made.randomise(3)
    return made


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", ["decoder", "wide_decoder"])
def test_kernels_that_begin_early_read_nothing_too_early(
    size: str, rows: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty steps of a graph whose kernels overlap equal thirty steps of kernels that wait for each other."""
    decoder = request.getfixturevalue(size)
    graph, waiting = loop(decoder, "streamed", rows, graph=True), loop(decoder, "streamed", rows, graph=False)
    kernels_wait(monkeypatch)
    for _ in range(30):
        graph.step()
        waiting.step()
        assert torch.equal(graph.tokens, waiting.tokens)
    for layer, memory in waiting.state.memory.items():
        assert torch.equal(graph.state.memory[layer], memory)
        assert torch.equal(graph.state.conv[layer], waiting.state.conv[layer])


def test_no_kernel_of_a_step_begins_before_the_step_before_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model's steps with nothing between them: few and small kernels, which could run far ahead."""
    small = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    decoder = Decoder(DecoderConfig.from_config(SIZES | small, "test"), torch.bfloat16, "cuda")
    decoder.randomise(3)
    decoder.step = "streamed"
    early, waiting = (DecodeState(decoder.config, 1, 128, "bf16", torch.bfloat16, "cuda") for _ in range(2))
    tokens = torch.tensor([7], device="cuda")
    decoder.decode(tokens, early)  # compiles
    early.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(25):
            decoder.decode(tokens, early)
    kernels_wait(monkeypatch)
    for _ in range(4):
        graph.replay()
    for _ in range(100):
        decoder.decode(tokens, waiting)
    assert torch.equal(early.seq_lens, waiting.seq_lens) and waiting.seq_lens.item() == 100
    assert torch.equal(early.conv[0], waiting.conv[0])
    assert torch.equal(early.memory[0], waiting.memory[0])
