"""Tensors by name from a folder of safetensors files or from GGUF files, each checked before it is read.

Names are those of transformers' checkpoints without the leading "model.": embed_tokens.weight,
layers.0.self_attn.q_proj.weight, norm.weight, lm_head.weight. Nothing is unpickled and no code is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_INDEX_BYTES = 64 << 20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PREFIXES = ("model.language_model.", "model.", "")
"""Of a checkpoint with a vision part, of a text model, and of a bare one; the first that fits the embedding."""
_NOT_TEXT = re.compile(r"(model\.)?visual\.|mtp\.|.*\.rotary_emb\.inv_freq$")
"""Vision, multi-token prediction, and a buffer that old checkpoints hold: none is part of the text decoder."""


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
        self._files: dict[str, tuple[Any, Path, str]] = {}
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
                self._files[name] = (opened, file, name)
        for name, file in listed.items():
            if name not in self._files or self._files[name][1] != file:
                raise ValueError(f"{file}: {name}: expected this tensor, as {INDEX} says, and it is missing")
        self._files = _canonical(self._files)

    def names(self) -> set[str]:
        return set(self._files)

    def _slice(self, name: str) -> Any:
        opened, _, stored = self._files[name]
        return opened.get_slice(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def where(self, name: str) -> str:
        _, file, stored = self._files[name]
        return f"{file}: {stored}"

    def read(self, name: str) -> Tensor:
        dtype = self._slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ValueError(f"{self.where(name)}: expected dtype {', '.join(_DTYPES)}, got {dtype}")
        opened, _, stored = self._files[name]
        return opened.get_tensor(stored)


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


def _canonical(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The text decoder's tensors under their canonical names."""
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in stored), "model.")
    return {name.removeprefix(prefix): value for name, value in stored.items() if not _NOT_TEXT.match(name)}


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
