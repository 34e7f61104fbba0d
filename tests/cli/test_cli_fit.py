"""`splitkv fit`: the capacity check as a user meets it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from commandline import flat, run, script

from splitkv import plan_memory
from splitkv.bench import fitting, machine
from splitkv.cache.models import model_from_config
from splitkv.problem import MIB

QWEN35_9B = {
    "model_type": "qwen3_5_text", "dtype": "bfloat16", "vocab_size": 248_320, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262_144,
}  # fmt: skip
CARD = ("--total", "24035MiB", "--weights-dtype", "q4_k_m")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN35_9B))
    return str(tmp_path)


def test_help_has_an_example() -> None:
    code, out, _ = run("fit", "--help")
    assert code == 0 and "Example: splitkv fit" in out


def test_the_table_the_verdict_and_the_largest_contexts(model: str) -> None:
    done = script("fit", "--model", model, "--context", "262144", "--free", "23300 MiB", *CARD)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    for text in (
        "8.95B parameters",
        "weights 5,417,050,975 5.05 GiB",
        "KV cache in f32 17,179,934,720 16.00 GiB",
        "recurrent state 51,904,512",
        "reserve 536,870,912 0.50 GiB",
        "available 24,431,820,800 22.75 GiB",
        "f32 KV 65,536 B/token x 262,145 tokens",
        "as given by --free",
        "fp8_e5m2 16,384 262,144",
        "fits with f32 KV; needs 21.59 GiB of 22.75 GiB",
    ):
        assert text in words
    arithmetic = [line for line in done.stdout.splitlines() if line.startswith("weights 5")]
    assert len(arithmetic) == 1 and max(len(x) for x in done.stdout.splitlines() if x not in arithmetic) <= 100


def test_json_is_the_librarys_own_plan_and_adds_up(model: str) -> None:
    asked = ("fit", "--model", model, "--context", "262144", "--free", "22000MiB", *CARD, "--workspace", "7")
    code, out, err = run(*asked, "--json")
    record = json.loads(out)
    assert (code, err, record["schema"]) == (0, "", "splitkv.fit.v1")
    geometry = model_from_config(QWEN35_9B, weights_dtype="q4_k_m")
    plan = plan_memory(geometry, 262_144, free_bytes=22_000 * MIB, total_bytes=24_035 * MIB, workspace_bytes=7)
    assert {name: record[name] for name in plan.as_dict()} == plan.as_dict()
    assert record["kv_dtype"] == "f16" and sum(record["terms"].values()) == record["need_bytes"]
    assert record["largest_context"] == plan.largest_contexts()
    name, *words = shlex.split(record["command"])
    assert name == "splitkv" and json.loads(run(*words)[1])["terms"] == record["terms"]


@pytest.mark.parametrize(("free", "refusal"), [("10GiB", "co_tenant"), ("10GiB", "exceeds_device")])
def test_a_refusal_is_exit_1_with_its_kind(free: str, refusal: str, model: str) -> None:
    total = {"co_tenant": "80GiB", "exceeds_device": "12GiB"}[refusal]
    asked = ("fit", "--model", model, "--context", "148000", "--free", free, "--total", total)
    code, out, _ = run(*asked)
    assert code == 1 and f"refused: {refusal}" in out and "none" in out
    code, out, _ = run(*asked, "--json")
    assert (code, json.loads(out)["refusal"], json.loads(out)["fits"]) == (1, refusal, False)
    assert json.loads(out)["largest_context"]["f32"] is None


def test_without_a_gpu_and_without_free_it_takes_this_machines_memory(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: (40 << 30, 64 << 30))
    code, out, _ = run("fit", "--model", model, "--context", "1000")
    assert code == 0 and "there is no GPU here, and --free was not given" in out
    record = json.loads(run("fit", "--model", model, "--context", "1000", "--unified", "--json")[1])
    assert (record["free_bytes"], record["total_bytes"], record["available_bytes"]) == (40 << 30, 64 << 30, 24 << 30)


def test_options_reach_the_sum(model: str) -> None:
    asked = ("fit", "--model", model, "--context", "1000", "--free", "100GB", "--json")
    record = json.loads(run(*asked, "--batch", "4", "--generated", "23", "--kv-dtypes", "fp8", "--weights", "5.5GB")[1])
    assert record["terms"]["weights"] == 5_500_000_000 and record["tokens"] == 1024
    assert (record["kv_dtype"], record["terms"]["kv_cache"]) == ("fp8_e4m3", 4 * 1024 * 16_384)
    assert record["terms"]["workspace"] > json.loads(run(*asked)[1])["terms"]["workspace"] > 0


def test_a_context_past_the_models_own_is_noted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN35_9B | {"max_position_embeddings": 32_768}))
    _, out, _ = run("fit", "--model", str(tmp_path), "--context", "40000", "--free", "80GiB")
    assert "note: the model was made for 32768 tokens; this asks for more" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--context", "262145"), "context: expected at most 262144 tokens with the generated, got 262145"),
        (("--context", "262144", "--generated", "1"), "got 262145"),
        (("--context", "1", "--free", "much"), "free: expected bytes, or a number with kB"),
        (("--context", "1", "--free", "1GiB", "--total", "1"), "total_bytes: expected at least 1073741824, got 1"),
        (("--context", "1", "--kv-dtypes", "f32,int8"), "kv_dtypes: expected one of f32"),
        (("--context", "1", "--weights-dtype", "int3"), "weights_dtype: expected one of f32"),
        (("--context", "1", "--batch", "0"), "batch: expected at least 1, got 0"),
        ((), "--context"),
    ],
)
def test_bad_usage_is_exit_2(words: tuple[str, ...], message: str, model: str) -> None:
    code, out, err = run("fit", "--model", model, *words)
    assert (code, out) == (2, "")
    assert message in flat(err) and "Traceback" not in err


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "is not there"),
        ("{", "expected JSON (config.json) or GGUF"),
        ('{"model_type": "rwkv"}', "model_type: expected one of"),
        ('{"model_type": "llama"}', "hidden_size: expected an integer of at least 1, and it is missing"),
        ("GGUFnothing", "expected a complete GGUF file"),
    ],
)
def test_a_bad_file_is_exit_2_with_its_name(contents: str | None, message: str, tmp_path: Path) -> None:
    if contents is not None and contents.startswith("GGUF"):
        pytest.importorskip("gguf")
    if contents is not None:
        (tmp_path / "config.json").write_text(contents)
    code, out, err = run("fit", "--model", str(tmp_path), "--context", "1000", "--free", "1GiB")
    assert (code, out) == (2, "")
    unwrapped = "".join(err.replace("│", " ").split())
    assert "config.json" in unwrapped and "".join(message.split()) in unwrapped


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0), ("24431820800", 24_431_820_800), ("24_000", 24_000), ("22.75GiB", 91 << 28),
        ("1.5 kB", 1500), ("512 MiB", 512 * MIB), ("1tb", 10**12), ("7 B", 7), ("0.1 KiB", 102),
    ],
)  # fmt: skip
def test_sizes_as_text(text: str, nbytes: int) -> None:
    assert fitting.parse_bytes(text, "free") == nbytes


@pytest.mark.parametrize("text", ["", "-1", "1e9", "GiB", "1 PiB", ".5GB", "1..5", "nan", "1__0"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="free: expected bytes"):
        fitting.parse_bytes(text, "free")
