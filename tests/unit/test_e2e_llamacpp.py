"""llama.cpp beside ours: what is asked of it, and what becomes of each way in which it can fail.

A stand-in for llama-cpp-python's bindings runs in the worker's process, so this holds where the package is missing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from splitkv.bench import e2e_llamacpp
from splitkv.bench.e2e_llamacpp import LlamaCppOptions, Tokens, llamacpp_logits, time_llamacpp

STAND_IN = """
import ctypes, os
from types import SimpleNamespace

__version__ = "stand-in"
LLAMA_FLASH_ATTN_TYPE_ENABLED, LLAMA_FLASH_ATTN_TYPE_DISABLED = 1, 0
llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
VOCAB = 10
log = None
def llama_log_set(callback, data):
    global log
    log = callback
def llama_backend_init(): print("noise on standard output")
def llama_supports_gpu_offload(): return False
def llama_model_default_params(): return SimpleNamespace()
def llama_context_default_params(): return SimpleNamespace()
def llama_model_get_vocab(model): return model
def llama_vocab_n_tokens(vocab): return VOCAB
def llama_print_system_info(): return b"no processor"
def llama_model_load_from_file(path, options):
    if b"broken" in path:
        log(4, b"error loading model: magic", None)
        return None
    return 1
def llama_init_from_model(model, options):
    if options.n_ctx > 5000:
        log(2, b"information", None)
        log(4, b"cudaMalloc failed: out of memory", None)
        return None
    flash = options.flash_attn_type
    if flash != (options.type_k != 0) or options.type_v != options.type_k:
        os._exit(9)
    return SimpleNamespace(held=0, last=None, type=options.type_k)
def llama_free(context): pass
def llama_batch_get_one(array, count): return list(array[:count])
def llama_decode(context, tokens):
    if not all(0 <= token < VOCAB for token in tokens): return -1
    context.held, context.last = context.held + len(tokens), tokens[-1]
    if context.type == 8 and context.held > 700: os.abort()
    if context.type == 30 and context.held > 700: return 1
    return 0
def llama_synchronize(context): pass
def llama_get_logits_ith(context, i):
    return (ctypes.c_float * VOCAB)(*[context.held * 100 + context.last + j / 16 for j in range(VOCAB)])
"""


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Any file; the stand-in does not read it."""
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    return file


def reasons(result: dict[str, Any]) -> dict[tuple[str, int], str]:
    return {(entry["kv_dtype"], entry["depth"]): entry["reason"] for entry in result["not_measured"]}


def test_every_depth_and_kv_type_has_a_row_or_a_reason(gguf: Path) -> None:
    options = LlamaCppOptions((600, 50), ("f32", "f16", "bf16", "fp8_e4m3"), steps=5, threads=1)
    result = time_llamacpp(gguf, options)
    assert (result["version"], result["system"]) == ("stand-in", "no processor")
    found = [(row["kv_dtype"], row["depth"]) for row in result["rows"]]
    assert found == [(kv, depth) for kv in ("f32", "f16", "bf16") for depth in (50, 600)]
    assert all(
        row["ms_per_token"] > 0 and row["steps"] == 5 and row["contender"] == "llama.cpp" for row in result["rows"]
    )
    assert reasons(result) == {("fp8_e4m3", depth): "llama.cpp has no fp8_e4m3 cache" for depth in (50, 600)}


def test_a_failure_costs_its_own_rows_and_names_its_reason(gguf: Path) -> None:
    result = time_llamacpp(gguf, LlamaCppOptions((50, 800), ("bf16", "f16"), steps=5, threads=1))
    assert [(row["kv_dtype"], row["depth"]) for row in result["rows"]] == [("bf16", 50), ("f16", 50), ("f16", 800)]
    assert reasons(result) == {("bf16", 800): "llama_decode returned 1: it gave no reason"}


def test_a_process_that_dies_is_a_reason(gguf: Path) -> None:
    result = time_llamacpp(gguf, LlamaCppOptions((50, 800), ("q8_0", "f16"), steps=5, threads=1))
    assert [(row["kv_dtype"], row["depth"]) for row in result["rows"]] == [("q8_0", 50)]
    found = reasons(result)
    assert set(found) == {("q8_0", 800), ("f16", 50), ("f16", 800)}
    assert all(text.startswith("llama.cpp's process ended with -6") for text in found.values())


def test_out_of_memory_gives_what_it_logged(gguf: Path) -> None:
    result = time_llamacpp(gguf, LlamaCppOptions((50, 6000), steps=5, threads=1))
    expected = "llama.cpp makes no context of 6005 tokens with f16 KV: cudaMalloc failed: out of memory"
    assert result["rows"] == [] and set(reasons(result).values()) == {expected}


def test_a_file_that_it_does_not_load(gguf: Path) -> None:
    file = gguf.with_name("broken.gguf")
    file.write_bytes(b"")
    found = reasons(time_llamacpp(file, LlamaCppOptions((50,), threads=1)))
    assert found["f16", 50] == f"llama.cpp does not load {file}: error loading model: magic"


def test_a_build_without_a_gpu_is_not_run_on_the_cpu_instead(gguf: Path) -> None:
    found = reasons(time_llamacpp(gguf, LlamaCppOptions((50,), threads=1, gpu_layers=-1)))
    assert found == {("f16", 50): "llama.cpp sees no GPU: built without CUDA, or none is here"}


def test_past_the_time_nothing_more_begins(gguf: Path) -> None:
    result = time_llamacpp(gguf, LlamaCppOptions((50,), ("f32", "f16"), threads=1, deadline=0.0))
    assert result["rows"] == [] and set(reasons(result).values()) == {"the time of the run was up"}


def test_logits_are_of_the_prompt_and_of_each_step(gguf: Path) -> None:
    logits = llamacpp_logits(gguf, Tokens((3,) * 9 + (7,), (1, 2)), threads=1)
    assert logits.dtype == torch.float32 and logits.shape == (3, 10)
    assert logits[:, 0].tolist() == [1007.0, 1101.0, 1202.0]
    with pytest.raises(RuntimeError, match="llama_decode returned -1"):
        llamacpp_logits(gguf, Tokens((3, 99)), threads=1)


def test_logits_come_with_the_times_and_cost_them_nothing(gguf: Path) -> None:
    result = time_llamacpp(gguf, LlamaCppOptions((50,), threads=1), compare=Tokens((3, 7), (1,)))
    assert len(result["rows"]) == 1 and result["logits"][:, 0].tolist() == [207.0, 301.0]
    result = time_llamacpp(gguf, LlamaCppOptions((50,), threads=1), compare=Tokens((3, 99)))
    assert len(result["rows"]) == 1 and result["logits"] == "llama_decode returned -1: it gave no reason"


def test_without_the_package(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e_llamacpp, "installed", lambda module: False)
    found = reasons(time_llamacpp(gguf, LlamaCppOptions((50,))))
    assert found == {("f16", 50): "llama-cpp-python is not installed"}
    with pytest.raises(RuntimeError, match="llama-cpp-python is not installed"):
        llamacpp_logits(gguf, Tokens((1,)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"depths": ()}, "depths: expected numbers above 4"),
        ({"depths": (4,)}, "depths: expected numbers above 4"),
        ({"depths": (100, 136)}, "depths: expected numbers more than 36 apart"),
        ({"depths": (100,), "steps": 0}, "steps: expected at least 1"),
    ],
)
def test_bad_options(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaCppOptions(**values)


def test_a_file_that_is_not_there(gguf: Path) -> None:
    with pytest.raises(ValueError, match="gguf: expected a GGUF file"):
        time_llamacpp(gguf.with_name("none.gguf"), LlamaCppOptions((50,)))
