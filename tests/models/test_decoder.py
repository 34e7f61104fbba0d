"""The decoder against transformers' eager models of the same weights, both against float64."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from tiny import FAMILIES, VOCAB, make, save, save_state
from transcripts import run

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


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """transformers' own, without stopping at an end token."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(ids) :].tolist()


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


NEW_FAMILIES = ("qwen3_moe", "qwen3_5_moe", "deepseek_v2", "gemma2", "gemma3")


@torch.no_grad()
@pytest.mark.parametrize("family", NEW_FAMILIES)
def test_rows_of_different_lengths_go_on_together(family: str, folders: dict[str, tuple[Any, Path]]) -> None:
    """Greedy tokens are those of transformers' generate, and the logits of each step, row by row."""
    model, folder = folders[family]
    decoder = open_model(folder).load(torch.float32, "cpu")
    prompts = [tokens(90).tolist(), tokens(150)[100:107].tolist(), tokens(150)[90:91].tolist()]
    loop = DecodeLoop(decoder, DecodeState(decoder.config, len(prompts), 128, "f32", torch.float32, "cpu"))
    for row, prompt in enumerate(prompts):
        loop.prefill(prompt, row, chunk=32)
    ours = [list(row) for row in zip(*loop.generate(STEPS), strict=True)]
    given = torch.tensor([row[-1] for row in ours])
    logits = decoder.decode(given, loop.state)
    for row, prompt in enumerate(prompts):
        assert ours[row] == greedy(model, prompt, STEPS)
        expected = model(torch.tensor([prompt + ours[row]])).logits[0, -1]
        assert (logits[row] - expected).abs().max() < 1e-4


def test_generate_runs_a_saved_model(folders: dict[str, tuple[Any, Path]]) -> None:
    for family in NEW_FAMILIES:
        model, folder = folders[family]
        words = ("--device", "cpu", "--max-new-tokens", "12", "--prompt", "Hello, you!", "--json")
        code, out, err = run("generate", "--model", str(folder), *words)
        assert (code, err) == (0, ""), err
        found, ids = json.loads(out)["tokens"], open_model(folder).tokenizer.prompt_ids("Hello, you!")
        assert found == greedy(model, ids, 12)[: len(found)] and len(found) > 1


CONFIG_FLOATS = ("norm_eps", "softmax_scale")
GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_5", *NEW_FAMILIES)


def plain_rope(family: str) -> Any:
    """A family's tiny model with unscaled positions: GGUF has other names for the scaled kinds."""
    if family == "deepseek_v2":
        return make(family)
    if family.startswith("gemma"):
        return make(family, query_pre_attn_scalar=16)  # which llama.cpp takes from the head, but for the 27B
    if family == "qwen3_moe":
        return make(family, rope_parameters=None, mlp_only_layers=[])  # of which llama.cpp has no name
    rope = FAMILIES[family].get("rope_parameters", {})
    return make(family, rope_parameters={**rope, "rope_type": "default"} if "qwen3_5" in family else None)


@pytest.mark.parametrize(
    ("family", "split_kv"), [*((family, True) for family in GGUF_FAMILIES), ("deepseek_v2", False)]
)
def test_a_gguf_file_holds_the_same_model(family: str, split_kv: bool, tmp_path: Path) -> None:
    model = plain_rope(family)
    stored = open_model(save(model, tmp_path / "folder")).load(torch.float32, "cpu")
    loaded = open_model(write_gguf(model, tmp_path / "m.gguf", split_kv=split_kv)).load(torch.float32, "cpu")
    for name in CONFIG_FLOATS:
        assert getattr(loaded.config, name) == pytest.approx(getattr(stored.config, name), rel=1e-6), name
    different = {"source", "rope", "local_rope", *CONFIG_FLOATS}
    for name in {field.name for field in fields(stored.config)} - different:
        assert getattr(loaded.config, name) == getattr(stored.config, name), name
    for name in ("rope", "local_rope"):
        ours, expected = getattr(loaded.config, name), getattr(stored.config, name)
        assert (ours is None) == (expected is None)
        if ours is not None:
            assert ours.frequencies == expected.frequencies
            assert (ours.scale, ours.all_columns) == pytest.approx((expected.scale, expected.all_columns), rel=1e-6)
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
