"""Real weights: greedy text of `splitkv generate` on a CPU equals that of transformers' eager on the same weights."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from smollm2 import long_prompt, model_file
from transcripts import command, run

from splitkv.models.loading import ModelFiles, open_model

transformers = pytest.importorskip("transformers")
NEW_TOKENS = 256
CHUNK = 128
"""Eager's scores of so many queries stay below the 32 MiB from where on malloc asks the system for every matrix."""
SHORT = "Explain to a child why the sky is blue, why sunsets are red, and why clouds are white. Take your time."


@pytest.fixture(scope="module")
def parsed_once() -> Iterator[None]:
    """transformers parses a GGUF file four times for a model and a tokenizer, four seconds each."""
    gguf = pytest.importorskip("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        yield


@pytest.fixture(scope="module")
def theirs(parsed_once: None) -> Any:
    """transformers' model of the same file, its quantised weights unpacked to f32 by its own means."""
    file = model_file()
    options = {"gguf_file": file.name, "attn_implementation": "eager", "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options).eval()


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return open_model(model_file())


def asked(*words: str) -> tuple[str, ...]:
    """`splitkv generate` on the real model."""
    return ("generate", "--model", str(model_file()), "--device", "cpu", *words, "--json")


def test_a_short_prompt_gives_transformers_greedy_text(theirs: Any, files: ModelFiles) -> None:
    done = command(*asked("--prompt", SHORT, "--max-new-tokens", str(NEW_TOKENS)))
    assert done.returncode == 0, done.stderr
    ours = json.loads(done.stdout)
    ids = torch.tensor([files.tokenizer.prompt_ids(SHORT)])
    with torch.no_grad():
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = out[0, ids.shape[1] :].tolist()
    assert len(ours["tokens"]) == NEW_TOKENS and ours["ended"] == "length"
    if ours["tokens"] != expected:
        audit(theirs, ids[0].tolist(), ours["tokens"])
    assert ours["tokens"] == expected
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_file().parent, gguf_file=model_file().name)
    assert ours["text"] == tokenizer.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_a_prompt_of_6000_tokens_gives_transformers_greedy_tokens(
    theirs: Any, files: ModelFiles, tmp_path: Path
) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text(long_prompt(340))
    ids = files.tokenizer.prompt_ids(text.read_text())
    assert len(ids) > 6000
    words = asked("--prompt-file", str(text), "--max-new-tokens", str(NEW_TOKENS), "--context", "6400")
    code, out, err = run(*words)
    assert code == 0, err
    ours = json.loads(out)
    assert ours["prompt_tokens"] == len(ids) and len(ours["tokens"]) == NEW_TOKENS
    assert audit(theirs, ids, ours["tokens"]) == 0


def last_logits(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Logits at the last positions: the rest first, in chunks, as eager attention makes a matrix of every pair."""
    cache = transformers.DynamicCache()
    first = ids.shape[1] - count
    for start in range(0, first, CHUNK):
        model(ids[:, start : min(start + CHUNK, first)], past_key_values=cache, logits_to_keep=1)
    return model(ids[:, first:], past_key_values=cache).logits[0]


@torch.no_grad()
def audit(theirs: Any, prompt: list[int], tokens: list[int]) -> int:
    """Number of tokens that are not transformers' own choice after the same tokens, which one forward shows for all.

    Greedy decoding chooses the same text exactly if this is 0: by induction, token after token. One that differs is
    excused only where float64 says that the two were too close for f32: their margin is below transformers' own
    error there. That warns.
    """
    ids, chosen = torch.tensor([prompt + tokens[:-1]]), torch.tensor(tokens)
    logits = last_logits(theirs, ids, len(tokens))
    flips = (logits.argmax(-1) != chosen).nonzero().flatten().tolist()
    if not flips:
        return 0
    exact = last_logits(theirs.double(), ids, len(tokens))
    theirs.float()
    for i in flips:
        margin = float(exact[i].max() - exact[i, chosen[i]])
        error = float((logits[i] - exact[i]).abs().max())
        assert margin <= 2 * error, f"token {i}: {tokens[i]}, {margin} below the best in float64; f32 errs by {error}"
        warnings.warn(f"token {i} differs: margin {margin:.2e} in float64, error of f32 {error:.2e}", stacklevel=2)
    return len(flips)
