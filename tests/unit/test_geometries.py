"""Published geometries by name: their sizes add up to what is published, and the decoder builds what it knows."""

import json
from pathlib import Path

import pytest

from splitkv.cache.models import model_from_config
from splitkv.models.config import DecoderConfig
from splitkv.models.geometries import GEOMETRIES, geometry_config

# Parameters, KV bytes per token in f16, layers that keep keys and values; counted by transformers, or published.
FACTS = {
    "qwen3.5-0.8b": (0.752e9, 12_288, 6),
    "qwen3.5-2b": (1.88e9, 12_288, 6),
    "qwen3.5-4b": (4.21e9, 32_768, 8),
    "qwen3.5-9b": (8.95e9, 32_768, 8),
    "qwen3.5-27b": (26.9e9, 65_536, 16),
    "qwen3.5-35b-a3b": (34.7e9, 20_480, 10),
    "qwen2.5-0.5b": (494_032_768, 12_288, 24),
    "deepseek-v2-lite": (15.7e9, 31_104, 27),
}


def test_every_geometry_is_held_against_facts() -> None:
    assert set(FACTS) == set(GEOMETRIES)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_sizes_are_the_published_ones(name: str) -> None:
    parameters, kv_bytes, layers = FACTS[name]
    model = model_from_config(geometry_config(name), source=name)
    assert model.parameters == pytest.approx(parameters, rel=5e-3)
    assert model.kv_bytes_per_token("f16") == kv_bytes and sum(group.layers for group in model.attention) == layers
    assert model.weights_bytes == 2 * model.parameters  # bf16, as published


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_decoder_builds_it(name: str) -> None:
    config = DecoderConfig.from_config(geometry_config(name), name)
    model = model_from_config(geometry_config(name), source=name)
    assert config.max_context == model.max_context
    assert sum(kind != "linear_attention" for kind in config.layer_types) == FACTS[name][2]
    if name.startswith("qwen3.5"):
        assert len(config.rope.frequencies) == 32 and config.rope.frequencies[0] == 1.0  # 64 of 256 columns turn


def test_names_have_any_case_and_give_a_copy() -> None:
    config = geometry_config("Qwen3.5-9B")
    config["hidden_size"] = 1
    assert geometry_config("qwen3.5-9b")["hidden_size"] == 4096


def test_a_config_file_is_a_geometry(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert geometry_config(str(tmp_path)) == geometry_config(str(tmp_path / "config.json")) == {"model_type": "qwen3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "expected a JSON object in"), ("{", "expected JSON in"), (None, "expected one of qwen")],
)
def test_what_is_no_geometry_is_refused_by_name(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "some.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="geometry: expected") as caught:
        geometry_config(str(file))
    assert message in str(caught.value) and "some.json" in str(caught.value)
