"""`splitkv generate` as a user meets it, on tiny models."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from tiny import make, save
from transcripts import PROGRAM, SRC, command, run

from splitkv.bench import generating, machine
from splitkv.models.loading import open_model
from splitkv.models.loop import DecodeLoop
from splitkv.models.state import DecodeState

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    return make("qwen3_5")


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


def asked(folder: Path, *words: str, new: int = 20) -> tuple[str, ...]:
    return ("generate", "--model", str(folder), "--device", "cpu", "--max-new-tokens", str(new), *words)


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """transformers' own, without stopping at an end token."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def test_text_goes_to_stdout_and_figures_to_stderr(model: Any, folder: Path) -> None:
    done = command(*asked(folder, "--prompt", "Hello, you!"))
    assert done.returncode == 0, done.stderr
    tokenizer = open_model(folder).tokenizer
    expected = greedy(model, tokenizer.prompt_ids("Hello, you!"), 20)
    if ends := [i for i, token in enumerate(expected) if token in tokenizer.end_ids]:
        expected = expected[: ends[0] + 1]
    text = tokenizer.decode(expected)
    assert done.stdout == (text if text.endswith("\n") else text + "\n")
    assert "prompt: 13 tokens in" in done.stderr and "% of the floor at" in done.stderr
    assert "f32 KV; ended by " + ("the model's end token" if ends else "--max-new-tokens") in done.stderr


def test_json_has_the_figures_and_a_command_that_does_it_again(folder: Path) -> None:
    words = asked(
        folder, "--prompt", "a 'quoted' text", "--temperature", "0.8", "--top-p", "0.9", "--seed", "3", "--json"
    )
    code, out, err = run(*words)
    record = json.loads(out)
    assert (code, err, record["schema"]) == (0, "", "splitkv.generate.v1")
    assert record["prompt_tokens"] == record["prefilled"] and record["steps"] == len(record["tokens"]) - 1
    rate = record["steps"] / record["decode_s"]
    assert record["decode_tokens_s"] == pytest.approx(rate, rel=1e-4)
    assert record["ms_per_token"] == pytest.approx(1e3 / rate, rel=1e-4)
    floor = record["bytes_per_token"] / record["read_bytes_s"] * 1e3
    assert record["floor_ms"] == pytest.approx(floor, rel=1e-4)
    assert record["percent_of_floor"] == pytest.approx(100 * floor / record["ms_per_token"], rel=1e-4)
    assert record["plan"]["fits"] and record["plan"]["terms"]["recurrent_state"] > 0
    name, *again = shlex.split(record["command"])
    assert name == "splitkv" and json.loads(run(*again)[1])["tokens"] == record["tokens"]
    assert json.loads(run(*words[:-2], "4", "--json")[1])["tokens"] != record["tokens"]


def test_bytes_per_token_are_the_weights_the_cache_and_the_states(model: Any, folder: Path) -> None:
    decoder = open_model(folder).load(torch.float32, "cpu")
    weights = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    assert decoder.bytes_per_step() == 4 * weights
    state = DecodeState(decoder.config, 1, 50, "f16", torch.float32, "cpu")
    cache, recurrent = 2 * 32 * 2 * 40, 3 * (4 * 4 * 16 * 32 + 4 * 4 * (2 * 2 * 16 + 4 * 32))
    assert state.bytes_per_step(40) == cache + 2 * recurrent


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "fp8"])
def test_kv_dtypes(kv_dtype: str, folder: Path) -> None:
    record = json.loads(run(*asked(folder, "--prompt", "abc", "--kv-dtype", kv_dtype, "--json"))[1])
    assert record["kv_dtype"] == ("fp8_e4m3" if kv_dtype == "fp8" else kv_dtype) == record["plan"]["kv_dtype"]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bit_weights(dtype: str, folder: Path) -> None:
    record = json.loads(run(*asked(folder, "--prompt", "abc", "--dtype", dtype, "--json"))[1])
    assert (record["dtype"], record["kv_dtype"]) == (dtype, dtype) and record["tokens"]


def test_a_gguf_file_gives_what_the_folder_gives(model: Any, folder: Path, tmp_path: Path) -> None:
    file = write_gguf(model, tmp_path / "m.gguf")
    words = ("--prompt", "abc", "--no-chat", "--json")
    ours, theirs = (json.loads(run(*asked(path, *words))[1]) for path in (file, folder))
    assert ours["tokens"] == theirs["tokens"] and ours["prompt_tokens"] == 3


def test_a_prompt_file_and_the_chat_template(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("naïve\n")
    for words, tokens in (((), 9), (("--no-chat",), 7)):
        record = json.loads(run(*asked(folder, "--prompt-file", str(text), *words, "--json"))[1])
        assert record["prompt_tokens"] == tokens


def test_what_does_not_fit_is_refused_before_any_weight_is_opened(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: (1 << 20, 1 << 34))
    code, out, err = run(*asked(tmp_path, "--prompt", "abc"))
    assert (code, out) == (1, "") and "refused, co_tenant" in err and "Traceback" not in err
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: (1 << 34, 1 << 34))
    code, _, err = run(*asked(tmp_path, "--prompt", "abc"))
    assert code == 2 and "expected model.safetensors or model.safetensors.index.json, and neither is there" in err


def test_auto_takes_f16_where_f32_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = asked(folder, "--prompt", "abc", "--context", "200000", "--json")
    plan = json.loads(run(*words)[1])["plan"]
    assert plan["kv_dtype"] == "f32" and plan["tokens"] == 200_001
    free = plan["need_bytes"] - 1
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: (free, free))
    record = json.loads(run(*words)[1])
    assert record["kv_dtype"] == "f16" and list(record["plan"]["tried"]) == ["f32", "f16"]
    code, _, err = run(*words, "--kv-dtype", "f32")
    assert code == 1 and "exceeds_device" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "prompt: expected one of --prompt and --prompt-file"),
        (("--prompt", "a", "--prompt-file", "b"), "prompt: expected one of --prompt and --prompt-file"),
        (("--prompt-file", "/nowhere/p.txt"), "prompt_file: expected a text file in UTF-8"),
        (("--prompt", "", "--no-chat"), "prompt: expected at least one token, got none"),
        (("--prompt", "a", "--context", "5"), "context: expected 23 (prompt 3, new 20) to 262144, got 5"),
        (("--prompt", "a", "--context", "300000"), "context: expected 23 (prompt 3, new 20) to 262144, got 300000"),
        (("--prompt", "a", "--kv-dtype", "int4"), "kv_dtype: expected one of f32"),
        (("--prompt", "a", "--dtype", "fp8"), "dtype: expected auto, f32, f16, bf16, got 'fp8'"),
        (("--prompt", "a", "--device", "tpu"), "device: expected cpu"),
        (("--prompt", "a", "--temperature", "-1"), "temperature: expected 0 or more"),
        (("--prompt", "a", "--top-p", "2"), "top_p: expected above 0"),
        (("--prompt", "a", "--max-new-tokens", "0"), "--max-new-tokens"),
    ],
)
def test_bad_usage_is_exit_2(words: tuple[str, ...], message: str, folder: Path) -> None:
    code, out, err = run(*asked(folder), *words)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err


def test_ids_that_the_embedding_lacks(model: Any, tmp_path: Path) -> None:
    save(make("llama", vocab_size=100, num_hidden_layers=1), tmp_path)
    code, _, err = run(*asked(tmp_path, "--prompt", "~~~"))
    assert code == 2 and f"{tmp_path}/tokenizer.json: expected ids below 100, got" in err


@pytest.mark.parametrize("when", ["prompt", "text"])
def test_ctrl_c_ends_with_what_there_is(when: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"prompt": 2, "text": 5}[when]

    def interrupt(*_: Any) -> Any:
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise KeyboardInterrupt
        return kept(*_)

    owner, name = {
        "prompt": ("splitkv.models.decoder.Decoder", "prefill"),
        "text": ("splitkv.models.decoder.Decoder", "decode"),
    }[when]
    from splitkv.models.decoder import Decoder

    kept = getattr(Decoder, name)
    monkeypatch.setattr(f"{owner}.{name}", interrupt)
    prompt = "x" * 1000
    code, out, err = run(*asked(folder, "--prompt", prompt))
    assert code == generating.INTERRUPTED == 130 and "ended by Ctrl-C" in err and "Traceback" not in err
    if when == "prompt":
        assert out == "" and "prompt: 512 tokens in" in err and "decode" not in err
    else:
        assert out.endswith("\n") and "decode: 4 steps in" in err
    monkeypatch.setattr(f"{owner}.{name}", kept)
    whole = run(*asked(folder, "--prompt", prompt))[1]
    assert whole.startswith(out.rstrip("\n�")) and len(out) < len(whole)


def test_a_real_signal(folder: Path) -> None:
    words = asked(folder, "--prompt", "abc", new=200_000)
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.read(10)  # it has begun
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "ended by Ctrl-C" in err and "Traceback" not in err


def test_rows_of_a_batch_do_not_see_each_other(folder: Path) -> None:
    """Three prompts of different lengths, continued together and alone."""
    decoder = open_model(folder).load(torch.float32, "cpu")
    prompts = [list(range(10, 10 + n)) for n in (5, 90, 33)]

    def continued(rows: list[list[int]]) -> list[list[int]]:
        loop = DecodeLoop(decoder, DecodeState(decoder.config, len(rows), 128, "f32", torch.float32, "cpu"))
        for row, prompt in enumerate(rows):
            loop.prefill(prompt, row)
        return [list(tokens) for tokens in zip(*loop.generate(12), strict=True)]

    together = continued(prompts)
    assert together == [continued([prompt])[0] for prompt in prompts]


def test_a_row_can_be_used_again(folder: Path) -> None:
    decoder = open_model(folder).load(torch.float32, "cpu")
    loop = DecodeLoop(decoder, DecodeState(decoder.config, 1, 128, "f32", torch.float32, "cpu"))
    loop.prefill([5, 6, 7])
    first = list(loop.generate(9))
    loop.prefill(list(range(60)))
    list(loop.generate(9))
    loop.prefill([5, 6, 7])
    assert list(loop.generate(9)) == first


@pytest.mark.parametrize("size", [0, 129])
def test_a_prompt_that_has_no_place(size: int, folder: Path) -> None:
    decoder = open_model(folder).load(torch.float32, "cpu")
    loop = DecodeLoop(decoder, DecodeState(decoder.config, 1, 128, "f32", torch.float32, "cpu"))
    with pytest.raises(ValueError, match=f"prompt: expected 1 to 128 tokens, got {size}"):
        loop.prefill([1] * size)


@pytest.mark.parametrize(
    ("package", "hint"), [("tokenizers", "tokenizers and jinja2"), ("jinja2", "jinja2"), ("safetensors", "a package")]
)
def test_without_a_package_the_extra_is_named(package: str, hint: str, folder: Path) -> None:
    done = command(*asked(folder, "--prompt", "a"), prelude=f"import sys; sys.modules[{package!r}] = None")
    words = " ".join(done.stderr.replace("│", " ").split())
    assert (done.returncode, done.stdout) == (2, "") and hint in words and "splitkv[generate]" in words


def test_help_has_an_example() -> None:
    code, out, _ = run("generate", "--help")
    assert code == 0 and "Example: splitkv generate" in out


def test_the_longest_context(folder: Path) -> None:
    record = json.loads(run(*asked(folder, "--prompt", "a", "--context", "262144", "--kv-dtype", "f16", "--json"))[1])
    assert record["plan"]["tokens"] == 262_145 and len(record["tokens"]) > 1


def test_a_cache_that_is_filled_to_its_last_place(folder: Path) -> None:
    decoder = open_model(folder).load(torch.float32, "cpu")
    prompt, new = list(range(40)), 9
    texts = []
    for capacity in (len(prompt) + new - 1, 100):
        loop = DecodeLoop(decoder, DecodeState(decoder.config, 1, capacity, "f32", torch.float32, "cpu"))
        loop.prefill(prompt)
        texts.append(list(loop.generate(new)))
        assert all(int(cache.dropped) == 0 for cache in loop.state.caches.values())
    assert texts[0] == texts[1]
