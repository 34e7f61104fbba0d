"""The decoder against transformers' eager models of the same weights, both against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from tiny import FAMILIES, VOCAB, make, save, save_state

from splitkv.models.decoder import Decoder
from splitkv.models.loading import open_model
from splitkv.models.loop import DecodeLoop
from splitkv.models.parts import project
from splitkv.models.state import DecodeState

pytest.importorskip("transformers")
PROMPT, STEPS, CHUNK = 170, 12, 70  # chunks that do not line up with the delta net's 64, nor with the window


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    made = {}
    for family in FAMILIES:
        model = make(family)
        made[family] = (model, save(model, tmp_path_factory.mktemp(family)))
    return made


def tokens(count: int = PROMPT + STEPS) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(1))


def teacher_forced(decoder: Decoder, ids: torch.Tensor, kv_dtype: str = "f32") -> torch.Tensor:
    """Logits after the prompt and after each further token: [STEPS + 1, VOCAB]."""
    state = DecodeState(decoder.config, 1, len(ids), kv_dtype, decoder.dtype, "cpu")
    loop = DecodeLoop(decoder, state)
    logits = [loop.prefill(ids[:PROMPT].tolist(), chunk=CHUNK)]
    logits += [decoder.decode(ids[i : i + 1], state)[0] for i in range(PROMPT, len(ids))]
    assert state.seq_lens.tolist() == [len(ids)]
    return torch.stack(logits)


@torch.no_grad()
def expected(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same logits from transformers: in f32, and in float64."""
    plain = model(ids[None]).logits[0, PROMPT - 1 :]
    exact = model.double()(ids[None]).logits[0, PROMPT - 1 :]
    model.float()
    return plain, exact


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_to_float64_as_transformers(family: str, folders: dict[str, tuple[Any, Path]]) -> None:
    model, folder = folders[family]
    ids = tokens()
    decoder = open_model(folder).load(torch.float32, "cpu")
    ours = teacher_forced(decoder, ids)
    plain, exact = expected(model, ids)
    theirs = (plain - exact).abs().max()
    assert (ours - exact).abs().max() <= 2 * theirs + 1e-5 * exact.abs().max()
    assert torch.equal(ours.argmax(-1), exact.argmax(-1))


GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_5")


def plain_rope(family: str) -> Any:
    """A family's tiny model with unscaled positions: GGUF has other names for the scaled kinds."""
    rope = FAMILIES[family]["rope_parameters"]
    return make(family, rope_parameters={**rope, "rope_type": "default"} if family == "qwen3_5" else None)


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_file_holds_the_same_model(family: str, tmp_path: Path) -> None:
    model = plain_rope(family)
    stored = open_model(save(model, tmp_path / "folder")).load(torch.float32, "cpu")
    loaded = open_model(write_gguf(model, tmp_path / "m.gguf")).load(torch.float32, "cpu")
    assert loaded.config.rope == stored.config.rope
    for ours, expected in zip(loaded.parts(), stored.parts(), strict=True):
        assert ours.name == expected.name
        if "norm.weight" in ours.name or "A_log" in ours.name:  # stored as w + 1 and exp(w) in f32
            assert torch.allclose(ours.dest, expected.dest, rtol=1e-6, atol=1e-6), ours.name
        else:
            assert torch.equal(ours.dest, expected.dest), ours.name


KINDS = [("llama", "F16"), ("llama", "BF16"), ("llama", "Q8_0"), ("qwen3_5", "F16"), ("qwen3_5", "BF16")]


@pytest.mark.parametrize(("family", "kind"), KINDS)  # transformers keeps quantised weights of Qwen3.5 packed
def test_gguf_weights_are_those_that_transformers_reads(family: str, kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate")
    file = write_gguf(plain_rope(family), tmp_path / "m.gguf", quantise=kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    expected = open_model(save_state(theirs, tmp_path / "folder")).load(torch.float32, "cpu")
    for ours, part in zip(open_model(file).load(torch.float32, "cpu").parts(), expected.parts(), strict=True):
        assert torch.allclose(ours.dest, part.dest, rtol=1e-6, atol=1e-6), ours.name


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out", [64, 33])
@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_projections_of_few_rows(rows: int, out: int, bias: bool) -> None:
    x, weight, added = torch.randn(rows, 48), torch.randn(out, 48), torch.randn(out) if bias else None
    exact = x.double() @ weight.double().T + (added.double() if added is not None else 0)
    made = project(x, weight, added)
    assert made.is_contiguous() and (made - exact).abs().max() < 1e-5


def test_an_unknown_kind_of_step(folders: dict[str, tuple[Any, Path]]) -> None:
    pytest.importorskip("triton")
    decoder = open_model(folders["llama"][1]).load(torch.float32, "cpu")
    assert decoder.step == "torch"
    decoder.step = "quick"
    with pytest.raises(ValueError, match="step: expected one of torch, fused, streamed, got 'quick'"):
        decoder.decode(torch.tensor([1]), DecodeState(decoder.config, 1, 8, "f32", torch.float32, "cpu"))
