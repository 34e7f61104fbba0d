"""From a path to a model that generates: what it is, whether it fits, and only then its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from splitkv import MemoryPlan, plan_memory

from ..cache.gguf_header import GgufHeader, read_gguf_header
from ..cache.memory import ModelGeometry
from ..cache.models import read_model
from ..problem import DTYPE_BYTES
from .config import DecoderConfig
from .decoder import Decoder
from .gguf_weights import GgufWeights
from .state import short_name
from .tokenizer import TextTokenizer
from .weights import SafetensorsWeights, Weights


@dataclass(frozen=True)
class ModelFiles:
    """A model's configuration, tokenizer and geometry. No weights are open yet."""

    path: Path
    config: DecoderConfig
    tokenizer: TextTokenizer
    geometry: ModelGeometry
    header: GgufHeader | None

    def weights(self) -> Weights:
        """Opens the weights: names, shapes and places are known and checked, nothing is read."""
        if self.header is not None:
            return GgufWeights(self.path, self.header, self.config)
        return SafetensorsWeights(self.path)

    def plan(
        self, dtype: torch.dtype, prompt: int, generated: int, kv_dtypes: tuple[str, ...], workspace_bytes: int,
        free_bytes: int, total_bytes: int | None, unified: bool,
    ) -> MemoryPlan:  # fmt: skip
        """The capacity check, for weights in `dtype`. Windowed layers count in full, as their cache here does."""
        weights = self.geometry.parameters * DTYPE_BYTES[short_name(dtype)]
        return plan_memory(
            replace(self.geometry.whole(), weights_bytes=weights),
            prompt,
            generated=generated,
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            unified=unified,
            kv_dtypes=kv_dtypes,
            workspace_bytes=workspace_bytes,
        )

    def load(
        self, dtype: torch.dtype, device: torch.device | str, progress: Callable[[int, int, str], None] | None = None
    ) -> Decoder:
        """The decoder with its weights in `dtype`. ValueError naming file and tensor."""
        weights = self.weights()
        layers = len(self.config.layer_types)
        if layers > len(weights.names()):  # a config may claim any number, and every layer has several
            raise ValueError(f"{self.path}: expected tensors of {layers} layers, got {len(weights.names())} in all")
        Decoder(self.config, dtype, "meta").check(weights)
        decoder = Decoder(self.config, dtype, device)
        decoder.load(weights, progress)
        return decoder


def open_model(path: str | Path) -> ModelFiles:
    """A folder with config.json, tokenizer.json and safetensors, or a GGUF file.

    Raises ValueError naming the file and the field; UnsupportedError for an architecture or an option not built.
    """
    path = Path(path)
    if path.is_dir():
        file = path / "config.json"
        geometry = read_model(path)
        config = DecoderConfig.from_config(json.loads(file.read_bytes()), str(file))
        return ModelFiles(path, config, TextTokenizer.from_folder(path), geometry, None)
    if not path.is_file():
        raise ValueError(f"model: expected a folder or a .gguf file, and {path} is not there")
    header = read_gguf_header(path)
    config = DecoderConfig.from_gguf(header, path)
    return ModelFiles(path, config, TextTokenizer.from_gguf(header, path), read_model(path), header)
