"""A decoder's weights as a GGUF file that llama.cpp runs: what gguf_weights.py undoes, done.

Matrices keep the decoder's dtype; vectors and convolutions are f32, as llama.cpp wants them. The decoder already holds
norms with their 1 added and -exp(A_log), which is what GGUF stores; left to change are names, the pairs of rows that
rotate together (llama) and the order of the value heads (Qwen3.5). There is no tokenizer: the vocabulary is stand-in
texts, which is enough to run token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitkv import UnsupportedError

from ..cache.gguf_header import GGUF_HINT
from ..cache.models import GGUF_ARCHITECTURES
from ..whole_file import whole_file
from .config import DecoderConfig, DeltaNet
from .decoder import Decoder
from .gguf_weights import rotated_heads, stored_name

_KINDS = ("llama", "qwen2", "qwen3", "qwen3_5")
_ARCHITECTURES = {kind: arch for arch, kind in GGUF_ARCHITECTURES.items() if kind in _KINDS} | {"mistral": "llama"}
_THETA_DIGITS = 6
"""Published rope bases have fewer; f32 frequencies give a base back to about 2e-6."""
_LONGEST_CONTEXT = 1 << 18
"""Stated where the config states none."""
_GGML_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

Progress = Callable[[int, int, str], None]


def write_gguf(decoder: Decoder, file: Path, progress: Progress | None = None) -> None:
    """Write the decoder to a GGUF file, one tensor after the other, whole or not at all.

    progress: called with tensors done, in all, and a name. Raises UnsupportedError for a model that GGUF or llama.cpp's
    graph of it cannot express, ValueError without the gguf package, OSError.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        raise ValueError(f"{file}: {GGUF_HINT.replace('reading', 'writing')}") from None
    config = decoder.config
    if config.kind not in _ARCHITECTURES:
        raise UnsupportedError(
            f"model: expected one of {', '.join(_ARCHITECTURES)} to write as GGUF, got {config.kind}"
        )
    metadata = _metadata(decoder)
    parts = list(decoder.parts())
    with whole_file(file) as temporary:
        writer = gguf.GGUFWriter(temporary, _ARCHITECTURES[config.kind])
        try:
            for key, value in metadata.items():
                add: Any = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
                add(f"{_ARCHITECTURES[config.kind]}.{key}", value)
            writer.add_tokenizer_model("none")
            writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
            for part in parts:
                dtype = _stored_dtype(part.dest, part.name)
                kind = gguf.GGMLQuantizationType[_GGML_NAMES[dtype]]
                name, size = stored_name(part.name, config.kind), part.dest.numel() * dtype.itemsize
                writer.add_tensor_info(name, part.dest.shape, np.dtype(np.float32), size, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for i, part in enumerate(parts):
                if progress is not None:
                    progress(i, len(parts), part.name)
                value = _reordered(part.dest, part.name, config).to("cpu", _stored_dtype(part.dest, part.name))
                writer.write_tensor_data(value.contiguous().flatten().view(torch.uint8).numpy())
        finally:
            writer.close()
    if progress is not None:
        progress(len(parts), len(parts), str(file))


def _stored_dtype(value: Tensor, name: str) -> torch.dtype:
    return torch.float32 if value.ndim == 1 or name.endswith("conv1d.weight") else value.dtype


def _metadata(decoder: Decoder) -> dict[str, Any]:
    """What llama.cpp must know of the model, by key without the architecture's name before it."""
    config = decoder.config
    if config.window is not None:
        raise UnsupportedError(f"model: expected no sliding window to write as GGUF, got one of {config.window}")
    layers, pairs = len(config.layer_types), decoder.frequencies.shape[0]
    metadata: dict[str, Any] = {
        "vocab_size": config.vocab_size, "context_length": config.max_context or _LONGEST_CONTEXT,
        "embedding_length": config.hidden_size, "block_count": layers,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_q_heads,
        "attention.head_count_kv": config.num_kv_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": _rope_base(decoder), "rope.dimension_count": 2 * pairs,
    }  # fmt: skip
    if config.kind != "qwen3_5":
        return metadata
    delta = config.delta
    if delta is None or delta.key_dim != delta.value_dim:
        raise UnsupportedError(f"model: expected delta-net layers whose keys and values have one size, got {delta}")
    every = (*config.layer_types, "full_attention").index("full_attention") + 1
    if config.layer_types != tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)):
        raise UnsupportedError(f"model: expected full attention in every n-th layer, got {config.layer_types}")
    return metadata | {
        # Of a text all three positions are the same, so how the pairs are shared out among them changes nothing.
        "rope.dimension_sections": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0],
        "full_attention_interval": every, "ssm.conv_kernel": delta.kernel, "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.num_key_heads, "ssm.time_step_rank": delta.num_value_heads,
        "ssm.inner_size": delta.num_value_heads * delta.value_dim,
    }  # fmt: skip


def _rope_base(decoder: Decoder) -> float:
    """The base that gives exactly the decoder's frequencies; UnsupportedError where none does, as they are scaled."""
    frequencies = decoder.frequencies.cpu()
    pairs = frequencies.shape[0]
    base = float(f"{float(frequencies[-1]) ** (-pairs / max(pairs - 1, 1)):.{_THETA_DIGITS}g}") if pairs > 1 else 1.0
    plain = 1.0 / base ** (torch.arange(0, 2 * pairs, 2).float() / (2 * pairs))
    if not torch.equal(plain, frequencies) or decoder.config.rope.scale != 1.0:
        raise UnsupportedError("model: expected rotary positions without scaling to write as GGUF, got scaled ones")
    return base


def _reordered(w: Tensor, name: str, config: DecoderConfig) -> Tensor:
    """The decoder's tensor with its rows in llama.cpp's order."""
    heads, delta = rotated_heads(name, config), config.delta
    if heads is not None:
        return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(w.shape)
    if "linear_attn" not in name or name.endswith("norm.weight") or delta is None:
        return w
    if name.endswith("out_proj.weight"):
        return _tiled(w.T, delta, delta.value_dim).T
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        values = delta.num_value_heads * delta.value_dim
        return torch.cat([w[:-values], _tiled(w[-values:], delta, delta.value_dim)])
    return _tiled(w, delta, delta.value_dim if name.endswith("in_proj_z.weight") else 1)


def _tiled(w: Tensor, delta: DeltaNet, width: int) -> Tensor:
    """Rows of value heads (each `width` rows) from k0 k0 .. k1 k1 .., grouped, to tiled order, k0 k1 .. k0 k1 .."""
    return w.unflatten(0, (delta.num_key_heads, -1, width)).transpose(0, 1).reshape(w.shape)
