"""Tensors by name from a folder of safetensors files or from GGUF files, each checked before it is read.

Names are those of transformers' checkpoints without the leading "model.": embed_tokens.weight,
layers.0.self_attn.q_proj.weight, norm.weight, lm_head.weight. Nothing is unpickled and no code is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_INDEX_BYTES = 64 << 20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
"""Of a checkpoint with a vision part, of Gemma 3's, of a text model, and of a bare one; the first that fits the
embedding."""
_NOT_TEXT = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector)\.|mtp\.|.*\.rotary_emb\.inv_freq$")
"""Vision, multi-token prediction, and a buffer that old checkpoints hold: none is part of the text decoder."""


_STACKED = re.compile(r"(layers\.\d+\.mlp\.experts)\.(gate|up|down|gate_up)_proj(\.weight)?")
_MOST_EXPERTS = 10_000


class Weights(Protocol):
    """A model's tensors by canonical name."""

    source: str
    rope_factors: Tensor | None

    def names(self) -> set[str]:
        """All that the decoder could use."""

    def shape(self, name: str) -> tuple[int, ...]:
        """As in transformers' checkpoint."""

    def where(self, name: str) -> str:
        """File and stored name, for errors."""

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in f32, f16 or bf16."""


class SafetensorsWeights:
    """The .safetensors files of a folder: one, or several that an index names."""

    rope_factors: Tensor | None = None

    def __init__(self, folder: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError:
            raise ValueError(
                f"{folder}: reading safetensors needs a package: pip install 'splitkv[generate]'"
            ) from None
        self.source = str(folder)
        self._files: dict[str, _Stored] = {}
        listed = _listed(folder)
        for file in sorted({path for path in listed.values()} or {folder / SINGLE}):
            if not file.is_file():
                raise ValueError(f"{file}: expected this safetensors file, and it is not there")
            try:
                opened = safe_open(file, framework="pt", device="cpu")
                stored = list(opened.keys())
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{file}: expected a complete safetensors file, and it cannot be read: {error}"
                ) from None
            for name in stored:
                self._files[name] = _Stored(opened, file, name)
        for name, file in listed.items():
            if name not in self._files or self._files[name].file != file:
                raise ValueError(f"{file}: {name}: expected this tensor, as {INDEX} says, and it is missing")
        self._files = _canonical(self._files)

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].shape()

    def where(self, name: str) -> str:
        stored = self._files[name]
        return f"{stored.file}: {stored.name}"

    def read(self, name: str) -> Tensor:
        stored = self._files[name]
        dtype = stored.slice().get_dtype()
        if dtype not in _DTYPES:
            raise ValueError(f"{self.where(name)}: expected dtype {', '.join(_DTYPES)}, got {dtype}")
        return stored.read()


@dataclass(frozen=True)
class _Stored:
    """A tensor in a safetensors file, or of a stack of experts one expert's rows from `first` to `end`."""

    opened: Any
    file: Path
    name: str
    expert: int | None = None
    first: int = 0
    end: int = 0

    def slice(self) -> Any:
        return self.opened.get_slice(self.name)

    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.slice().get_shape())
        return shape if self.expert is None else (self.end - self.first, shape[2])

    def read(self) -> Tensor:
        if self.expert is None:
            return self.opened.get_tensor(self.name)
        return self.slice()[self.expert : self.expert + 1, self.first : self.end][0]


def _listed(folder: Path) -> dict[str, Path]:
    """Tensor name to file, from the index; empty where there is a single file."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise ValueError(f"{folder}: expected {SINGLE} or {INDEX}, and neither is there")
        return {}
    size = index.stat().st_size
    if size > _MOST_INDEX_BYTES:
        raise ValueError(f"{index}: expected at most {_MOST_INDEX_BYTES} bytes, got {size}")
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{index}: expected JSON: {error}") from None
    names = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(names, Mapping) or not names:
        raise ValueError(f"{index}: weight_map: expected an object of tensor names and files")
    for tensor, name in names.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index}: weight_map.{tensor}: expected a .safetensors file in the same folder, got {name!r}"
            )
    return {tensor: folder / name for tensor, name in names.items()}


def _canonical(stored: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """The text decoder's tensors under their canonical names, each expert's for itself."""
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in stored), "model.")
    found = {}
    for full, value in stored.items():
        if _NOT_TEXT.match(full):
            continue
        name = full.removeprefix(prefix).removeprefix("language_model.")  # which Gemma 3's lm_head has alone
        stacked = unstacked(name, value.shape()) if _STACKED.fullmatch(name) else []
        for own, expert, first, end in stacked:
            found[own] = replace(value, expert=expert, first=first, end=end)
        if not stacked:
            found[name] = value
    return found


def unstacked(name: str, shape: tuple[int, ...]) -> list[tuple[str, int, int, int]]:
    """Of a tensor that stacks a layer's experts: each one's own name, its place, and its first and last rows there.

    Empty for any other tensor. Where gate and up are stacked too, gate's rows come first.
    """
    match = _STACKED.fullmatch(name)
    if match is None or len(shape) != 3 or not 1 <= shape[0] <= _MOST_EXPERTS:
        return []
    rows = shape[1]
    parts = [("gate", 0, rows // 2), ("up", rows // 2, rows)] if match[2] == "gate_up" else [(match[2], 0, rows)]
    return [
        (f"{match[1]}.{expert}.{part}_proj.weight", expert, first, end)
        for expert in range(shape[0])
        for part, first, end in parts
    ]


def check_names(weights: Weights, expected: Iterable[str]) -> None:
    """ValueError if a tensor is missing, or there is one that the decoder would leave out."""
    wanted, there = set(expected), weights.names()
    missing = sorted(wanted - there)
    if missing:
        raise ValueError(
            f"{weights.source}: {missing[0]}: expected this tensor, and it is missing ({len(missing)} are)"
        )
    extra = sorted(there - wanted - {"lm_head.weight"})  # a tied model may store the embedding twice
    if extra:
        raise ValueError(
            f"{weights.source}: {extra[0]}: expected no such tensor in this architecture ({len(extra)} such)"
        )
