"""Tensors of GGUF files under the names and in the layout of transformers' checkpoints.

llama.cpp's converters change some tensors, and each change is undone here: rows of q and k are paired for its
rotation (llama), norms are stored with their 1 added, A_log as -exp(A_log), and value heads tiled instead of
grouped by key head (Qwen3.5). Quantised tensors become f32 by the gguf package.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..cache.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from ..cache.models import Fields, other_shards
from .config import DecoderConfig, DeltaNet
from .weights import unstacked

_TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_K_B, _V_B = "self_attn.k_b_proj", "self_attn.v_b_proj"
_GEMMA_LEAVES = {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_LEAVES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj", "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_OWN_LEAVES: dict[str, dict[str, str]] = {
    "deepseek_v2": {
        "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": _K_B, "attn_v_b": _V_B,
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    "gemma2": _GEMMA_LEAVES,
    "gemma3": _GEMMA_LEAVES,
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
                elif (name := canonical_name(tensor.name, config)) is not None:
                    self._add(name, path, tensor)
        ends = [name.removesuffix(f"{_K_B}.weight") for name in self._tensors if name.endswith(f"{_K_B}.weight")]
        self._split = {f"{layer}self_attn.kv_b_proj.weight": layer for layer in ends}

    def _add(self, name: str, path: Path, tensor: GgufTensor) -> None:
        stacked = unstacked(name, tensor.shape)
        for own, expert, first, end in stacked:
            row_bytes = tensor.nbytes // (tensor.shape[0] * tensor.shape[1])
            start = tensor.start + (expert * tensor.shape[1] + first) * row_bytes
            shape = (end - first, tensor.shape[2])
            self._add(own, path, replace(tensor, shape=shape, start=start, nbytes=shape[0] * row_bytes))
        if not stacked:
            if name in self._tensors:
                raise ValueError(f"{path}: {tensor.name}: expected once, and another file or name has it too")
            self._tensors[name] = (path, tensor)

    def _halves(self, name: str) -> tuple[str, str] | None:
        """The tensors that hold W_k, transposed, and W_v of each head of a kv_b_proj stored in two."""
        layer = self._split.get(name)
        return None if layer is None else (f"{layer}{_K_B}.weight", f"{layer}{_V_B}.weight")

    def names(self) -> set[str]:
        found = set(self._tensors)
        for name in self._split:
            found -= set(self._halves(name) or ())
        return found | set(self._split)

    def where(self, name: str) -> str:
        halves = self._halves(name)
        path, tensor = self._tensors[name if halves is None else halves[0]]
        return f"{path}: {tensor.name}"

    def shape(self, name: str) -> tuple[int, ...]:
        halves = self._halves(name)
        if halves is not None:
            k, v = (self._tensors[half][1].shape if half in self._tensors else () for half in halves)
            fits = len(k) == len(v) == 3 and (k[0], k[1]) == (v[0], v[2])
            return (k[0] * (k[2] + v[1]), k[1]) if fits else (*k, *v)
        shape = self._tensors[name][1].shape
        if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
            return (1, *shape)
        return (shape[0], 1, shape[1]) if name.endswith("conv1d.weight") and len(shape) == 2 else shape

    def read(self, name: str) -> Tensor:
        halves = self._halves(name)
        if halves is not None:
            k, v = (_dequantise(*self._tensors[half]) for half in halves)
            return torch.cat([k.mT, v.to(k.dtype)], 1).flatten(0, 1)
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


def canonical_name(stored: str, config: DecoderConfig) -> str | None:
    """The checkpoint's name of a GGUF tensor; None for a block after the stack (multi-token prediction)."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", stored)
    if match is None:
        return _TOP.get(stored, stored)
    if int(match[1]) >= len(config.layer_types):
        return None
    leaf, _, end = match[2].rpartition(".")
    known = _OWN_LEAVES.get(config.kind, {}).get(leaf) or _LEAVES.get(leaf)
    name = _WHOLE_LEAVES.get(match[2]) or (f"{known}.{end}" if known else match[2])
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
