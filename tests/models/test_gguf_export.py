"""Decoders written as GGUF files: read back they are the same, and llama.cpp computes the same logits from them.

llama.cpp takes half an hour to compile, so its part is skipped where llama-cpp-python is not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from smollm2 import model_file
from tiny import VOCAB, make, save

from splitkv import UnsupportedError
from splitkv.bench.e2e_llamacpp import Tokens, llamacpp_logits
from splitkv.cache.gguf_header import read_gguf_header
from splitkv.models.config import DecoderConfig
from splitkv.models.decoder import Decoder
from splitkv.models.gguf_export import write_gguf
from splitkv.models.gguf_weights import GgufWeights
from splitkv.models.loading import open_model
from splitkv.models.loop import DecodeLoop
from splitkv.models.state import DecodeState

pytest.importorskip("transformers")
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
EXPORTED: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": PLAIN},
    "qwen2": {"rope_parameters": PLAIN},
    "qwen3": {"rope_parameters": PLAIN},
    "qwen3_5": {"linear_key_head_dim": 32},
    "qwen3_5 untied, every second": {"layer_types": ["linear_attention", "full_attention"] * 2},
}
"""Changes to the tiny models: llama.cpp wants delta-net keys and values of one size, GGUF positions without scaling."""
EXPORTED["qwen3_5 untied, every second"] |= EXPORTED["qwen3_5"]
PROMPT, STEPS = 70, 6


def tiny_model(name: str) -> Any:
    return make(name.split()[0], **EXPORTED[name], tie_word_embeddings="untied" not in name)


def decoder_of(model: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return open_model(save(model, folder)).load(dtype, "cpu")


def read_back(file: Path, dtype: torch.dtype) -> Decoder:
    header = read_gguf_header(file)
    config = DecoderConfig.from_gguf(header, file)
    decoder = Decoder(config, dtype, "cpu")
    decoder.load(GgufWeights(file, header, config))
    return decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXPORTED)
def test_the_file_holds_the_decoder(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    decoder = decoder_of(tiny_model(name), tmp_path / "folder", dtype)
    file, calls = tmp_path / "m.gguf", []
    write_gguf(decoder, file, lambda done, total, text: calls.append((done, total)))
    loaded = read_back(file, dtype)
    assert loaded.config.rope == decoder.config.rope and loaded.config.layer_types == decoder.config.layer_types
    for ours, part in zip(loaded.parts(), decoder.parts(), strict=True):
        assert ours.name == part.name
        if "A_log" in part.name or (name.startswith("qwen3_5") and "norm.weight" in part.name):  # stored as f(w) in f32
            assert torch.allclose(ours.dest, part.dest, rtol=1e-6, atol=1e-6), part.name
        else:
            assert torch.equal(ours.dest, part.dest), part.name
    parts = len(list(decoder.parts()))
    assert calls == [(i, parts) for i in range(parts + 1)]


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(tiny_model("qwen2"), tmp_path / "folder")
    (tmp_path / "m.gguf").write_text("an older file")

    def fail(done: int, total: int, text: str) -> None:
        if done == 5:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_gguf(decoder, tmp_path / "m.gguf", fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "m.gguf"]
    assert (tmp_path / "m.gguf").read_text() == "an older file"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "scaled positions": ("llama", {}, "without scaling"),
    "yarn": ("qwen3", {}, "without scaling"),
    "window": ("mistral", {}, "no sliding window to write as GGUF, got one of 40"),
    "unequal delta net": ("qwen3_5", {}, "keys and values have one size"),
    "no period": (
        "qwen3_5",
        EXPORTED["qwen3_5"] | {"layer_types": ["full_attention", "linear_attention"] * 2},
        "in every n-th layer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_gguf_cannot_say_is_refused(name: str, tmp_path: Path) -> None:
    family, changes, message = REFUSED[name]
    decoder = decoder_of(make(family, **changes), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match=message):
        write_gguf(decoder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


# ---- llama.cpp -----------------------------------------------------------------------------------------------


def tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(0, vocab_size, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(1))


def our_logits(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """After the prompt and after each further token."""
    state = DecodeState(decoder.config, 1, len(ids), "f32", decoder.dtype, "cpu")
    logits = [DecodeLoop(decoder, state).prefill(ids[:PROMPT].tolist())]
    return torch.stack(logits + [decoder.decode(ids[i : i + 1], state)[0] for i in range(PROMPT, len(ids))])


def llamacpp(file: Path, ids: torch.Tensor) -> torch.Tensor:
    pytest.importorskip("llama_cpp")
    return llamacpp_logits(file, Tokens(tuple(ids[:PROMPT].tolist()), tuple(ids[PROMPT:].tolist())), threads=1)


@pytest.mark.parametrize("name", EXPORTED)
def test_llamacpp_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    model, ids = tiny_model(name), tokens(VOCAB)
    decoder = decoder_of(model, tmp_path / "folder")
    write_gguf(decoder, tmp_path / "m.gguf")
    theirs, ours = llamacpp(tmp_path / "m.gguf", ids), our_logits(decoder, ids)
    with torch.no_grad():
        exact = model.double()(ids[None]).logits[0, PROMPT - 1 :]
    for logits in (theirs, ours):
        assert (logits - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_llamacpp_computes_the_same_logits_of_smollm2(tmp_path: Path) -> None:
    """From the weights unpacked to f32, and from the shipped file, where llama.cpp rounds activations to 8 bits."""
    files = open_model(model_file())
    decoder, ids = files.load(torch.float32, "cpu"), tokens(files.config.vocab_size)
    ours = our_logits(decoder, ids)
    write_gguf(decoder, tmp_path / "m.gguf")
    size = ours.abs().max()
    assert (llamacpp(tmp_path / "m.gguf", ids) - ours).abs().max() <= 1e-5 * size
    assert (llamacpp(model_file(), ids) - ours).abs().max() <= 0.1 * size
