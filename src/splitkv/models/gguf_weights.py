"""Tensors of GGUF files under the names and in the layout of transformers' checkpoints.

llama.cpp's converters change some tensors, and each change is undone here: rows of q and k are paired for its
rotation (llama), norms are stored with their 1 added, A_log as -exp(A_log), and value heads tiled instead of
grouped by key head (Qwen3.5). Quantised tensors become f32 by the gguf package.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..cache.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from ..cache.models import Fields, other_shards
from .config import DecoderConfig, DeltaNet

_TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_LEAVES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_WHOLE_LEAVES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_ROPE_FACTORS = "rope_freqs.weight"
_PLAIN = {0: np.float32, 1: np.float16}
_BF16 = 30
_PIECE_ELEMENTS = 1 << 24
"""Dequantised at a time: 64 MiB of f32."""


class GgufWeights:
    """The tensors of a GGUF model in one file or several."""

    def __init__(self, file: Path, header: GgufHeader, config: DecoderConfig) -> None:
        self.source = str(file)
        self.config = config
        self._tensors: dict[str, tuple[Path, GgufTensor]] = {}
        self.rope_factors: Tensor | None = None
        shards = Fields(header.metadata, str(file)).integer("split.count", 1, least=0)
        headers = {file: header}
        if shards > 1:
            headers |= {other: read_gguf_header(other) for other in other_shards(file, shards)}
        for path, part in headers.items():
            for tensor in part.tensors.values():
                if tensor.name == _ROPE_FACTORS:
                    self.rope_factors = _dequantise(path, tensor).float()
                elif (name := canonical_name(tensor.name, len(config.layer_types))) is not None:
                    if name in self._tensors:
                        raise ValueError(f"{path}: {tensor.name}: expected once, and another file or name has it too")
                    self._tensors[name] = (path, tensor)

    def names(self) -> set[str]:
        return set(self._tensors)

    def where(self, name: str) -> str:
        path, tensor = self._tensors[name]
        return f"{path}: {tensor.name}"

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._tensors[name][1].shape
        return (shape[0], 1, shape[1]) if name.endswith("conv1d.weight") and len(shape) == 2 else shape

    def read(self, name: str) -> Tensor:
        path, tensor = self._tensors[name]
        undo = self._undo(name)
        plain = _dequantise(path, tensor).reshape(self.shape(name))
        return plain if undo is None else undo(plain)

    def _undo(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """What takes this tensor back to the checkpoint's layout; None if it is as it was."""
        config, delta = self.config, self.config.delta
        heads = rotated_heads(name, config)
        if heads is not None:
            return lambda w: w.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(w.shape)
        if name.endswith("A_log") and delta is not None:
            return lambda w: torch.log(-_grouped(w, delta, 1))
        if name.endswith("norm.weight") and config.norm_offset and "linear_attn" not in name:
            return lambda w: w.float() - config.norm_offset
        if "linear_attn" not in name or delta is None or name.endswith("norm.weight"):
            return None
        values = delta.num_value_heads * delta.value_dim
        if name.endswith("out_proj.weight"):
            return lambda w: _grouped(w.T, delta, delta.value_dim).T
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            return lambda w: torch.cat([w[:-values], _grouped(w[-values:], delta, delta.value_dim)])
        return lambda w: _grouped(w, delta, delta.value_dim if name.endswith("in_proj_z.weight") else 1)


def canonical_name(stored: str, num_layers: int) -> str | None:
    """The checkpoint's name of a GGUF tensor; None for a block after the stack (multi-token prediction)."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", stored)
    if match is None:
        return _TOP.get(stored, stored)
    if int(match[1]) >= num_layers:
        return None
    leaf, _, end = match[2].rpartition(".")
    name = _WHOLE_LEAVES.get(match[2]) or (f"{_LEAVES[leaf]}.{end}" if leaf in _LEAVES else match[2])
    return f"layers.{match[1]}.{name}"


def stored_name(name: str, kind: str) -> str:
    """The GGUF name of a checkpoint's tensor; the reverse of canonical_name for an architecture of this kind."""
    stored = {canonical: stored for stored, canonical in (_TOP | _WHOLE_LEAVES).items()}
    leaves = {canonical: stored for stored, canonical in _LEAVES.items()}
    leaves["post_attention_layernorm"] = "post_attention_norm" if kind == "qwen3_5" else "ffn_norm"
    if name in stored:
        return stored[name]
    _, layer, rest = name.split(".", 2)
    leaf, _, end = rest.rpartition(".")
    return f"blk.{layer}.{stored.get(rest) or f'{leaves[leaf]}.{end}'}"


def rotated_heads(name: str, config: DecoderConfig) -> int | None:
    """The heads of a tensor whose rows llama.cpp pairs for its rotation; None for every other tensor."""
    if config.kind in ("llama", "mistral") and re.search(r"self_attn\.[qk]_proj", name):
        return config.num_q_heads if "q_proj" in name else config.num_kv_heads
    return None


def _grouped(w: Tensor, delta: DeltaNet, width: int) -> Tensor:
    """Rows of value heads (each `width` rows) from tiled order, k0 k1 .. k0 k1 .., to k0 k0 .. k1 k1 .."""
    per_key = delta.num_value_heads // delta.num_key_heads
    return w.unflatten(0, (per_key, delta.num_key_heads, width)).transpose(0, 1).reshape(w.shape)


def _dequantise(file: Path, tensor: GgufTensor) -> Tensor:
    """The tensor's values: as stored where that is f32, f16 or bf16, else f32."""
    raw = np.memmap(file, np.uint8, "r", tensor.start, (tensor.nbytes,))
    if tensor.type_id in _PLAIN:
        return torch.from_numpy(raw.view(_PLAIN[tensor.type_id]).copy()).reshape(tensor.shape)
    if tensor.type_id == _BF16:
        return torch.from_numpy(raw.copy()).view(torch.bfloat16).reshape(tensor.shape)
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.type_id)
    rows = raw.reshape(-1, tensor.nbytes // (tensor.elements // tensor.shape[-1]))
    out = torch.empty((rows.shape[0], tensor.shape[-1]))
    step = max(1, _PIECE_ELEMENTS // tensor.shape[-1])
    for start in range(0, rows.shape[0], step):
        try:
            piece = gguf.quants.dequantize(rows[start : start + step], kind)
        except NotImplementedError:
            raise ValueError(
                f"{file}: {tensor.name}: expected a type that the gguf package unpacks, got {kind.name}"
            ) from None
        out[start : start + step] = torch.from_numpy(np.ascontiguousarray(piece, np.float32))
    return out.reshape(tensor.shape)
