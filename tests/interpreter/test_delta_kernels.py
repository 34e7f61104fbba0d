"""One token of a delta-net layer by the GPU's kernels, in the interpreter, against the same in torch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from helpers import Guarded

from splitkv.models.config import DecoderConfig
from splitkv.models.delta_kernels import step
from splitkv.models.delta_net import DeltaNetMixer, delta_step

ROWS = 3
TOKENS = 9


def mixer(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int, dtype: torch.dtype
) -> DeltaNetMixer:
    config = DecoderConfig.from_config(
        {
            "model_type": "qwen3_5_text", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
            "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_key_head_dim": key_dim,
            "linear_value_head_dim": value_dim, "linear_conv_kernel_dim": kernel,
        },
        "test",
    )  # fmt: skip
    made = DeltaNetMixer(config, 0, dtype, torch.device("cpu"))
    draw = torch.Generator().manual_seed(3)
    for weight in made.parameters():
        weight.normal_(0, 0.5, generator=draw)
    made.rate.copy_(-made.rate.abs())
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes", [(2, 4, 16, 32, 4), (1, 1, 128, 128, 4), (2, 6, 24, 40, 2), (3, 3, 16, 200, 3)], ids=str
)
def test_steps(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """Ten tokens in a row: outputs, both states, and no byte beside them. Sizes that are no powers of two as well."""
    layer = mixer(*sizes, dtype)
    delta = layer.delta
    draw = torch.Generator().manual_seed(4)
    conv = Guarded((ROWS, delta.kernel, delta.channels), dtype)
    memory = Guarded((ROWS, delta.num_value_heads, delta.key_dim, delta.value_dim), torch.float32)
    conv.tensor.normal_(generator=draw)
    memory.tensor.normal_(generator=draw)
    expected_conv, expected_memory = conv.tensor.clone(), memory.tensor.clone()
    positions = torch.tensor([0, 5, 262_100], dtype=torch.int32)
    for i in range(10):
        projected = torch.randn(ROWS, sum(layer.sizes), generator=draw).to(dtype)
        projected[0] *= 30 * (i == 5) + 1  # gates at their ends, and softplus beyond its threshold
        expected = layer.step_in_torch(projected, positions, expected_conv, expected_memory)
        out = step(projected, positions, conv.tensor, memory.tensor, **layer.step_weights())
        tolerance = 2e-5 if dtype == torch.float32 else 4e-3
        assert (out - expected).abs().max() < tolerance * expected.abs().max()
        assert torch.equal(conv.tensor, expected_conv)
        assert (memory.tensor - expected_memory).abs().max() < tolerance * expected_memory.abs().max()
        expected_memory.copy_(memory.tensor)
        positions += 1
    assert conv.intact() and memory.intact()


def exact(layer: DeltaNetMixer, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs [tokens, ..], last memory) of a row from its beginning, in float64: its convolution over the whole run,
    with zeros before it, instead of over inputs held."""
    layer = copy.deepcopy(layer).double()
    qkv, z, b, a = projected.double().split(layer.sizes, -1)
    seen = F.pad(qkv.T, (layer.delta.kernel - 1, 0))[None]
    mixed = F.silu(F.conv1d(seen, layer.conv[:, None], groups=seen.shape[1]))[0].T
    q, k, *others = layer._split(mixed, a, b)
    q, k = (t.repeat_interleave(others[0].shape[1] // t.shape[1], 1) for t in (q, k))
    memory = torch.zeros(1, *others[0].shape[1:2], layer.delta.key_dim, layer.delta.value_dim, dtype=torch.float64)
    out = [delta_step(*(t[i : i + 1] for t in (q, k, *others)), memory) for i in range(len(projected))]
    return layer._gated(torch.cat(out), z), memory[0]


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_rows_from_their_beginning(kernel: int) -> None:
    """Row r is r tokens ahead, so that the rows of a launch are at every position from 0 on, and in every slot."""
    layer = mixer(2, 4, 16, 32, kernel, torch.float32)
    delta, rows, columns = layer.delta, TOKENS, sum(layer.sizes)
    projected = torch.randn(rows, 2 * TOKENS, columns, generator=torch.Generator().manual_seed(5))
    conv = torch.zeros(rows, kernel, delta.channels)
    memory = torch.zeros(rows, delta.num_value_heads, delta.key_dim, delta.value_dim)
    outs: list[list[torch.Tensor]] = [[] for _ in range(rows)]
    for first in (*range(1, rows), *[0] * TOKENS):  # the last rows alone, which so are ahead, then all
        positions = torch.tensor([len(out) for out in outs[first:]], dtype=torch.int32)
        given = torch.stack([projected[first + i, p] for i, p in enumerate(positions.tolist())])
        out = step(given, positions, conv[first:], memory[first:], **layer.step_weights())
        for kept, one in zip(outs[first:], out, strict=True):
            kept.append(one)
    assert [len(out) for out in outs] == [TOKENS + i for i in range(rows)]
    for row, out in enumerate(outs):
        expected, last = exact(layer, projected[row, : len(out)])
        assert (torch.stack(out) - expected).abs().max() < 1e-5 * expected.abs().max()
        assert (memory[row] - last).abs().max() < 1e-5 * last.abs().max()
