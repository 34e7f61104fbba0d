"""`splitkv bench e2e` as a user meets it."""

import json
from pathlib import Path

import pytest
from commandline import flat, run, script

from splitkv.bench.e2e_source import SMOLLM2
from splitkv.models.geometries import GEOMETRIES

TINY = {
    "model_type": "qwen2", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "tiny.json"
    file.write_text(json.dumps(TINY))
    return file


def test_a_run_prints_a_table_and_writes_the_file_that_its_command_re_creates(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "e2e.json"
    words = (
        "bench",
        "e2e",
        "--geometry",
        str(model),
        "--device",
        "cpu",
        "--depths",
        "40,200",
        "--kv-dtypes",
        "f16,fp8",
    )
    done = script(*words, "--batches", "2", "--prefill", "40", "--profile", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200" in done.stdout and "40*" in done.stdout and "same" in done.stdout and f"wrote {out}" in done.stdout
    assert "aten::" in done.stdout and "logits against f32 KV" in done.stdout
    record = json.loads(out.read_text())
    assert record["command"] == (
        f"splitkv bench e2e --geometry {model} --depths 40,200 --kv-dtypes f16,fp8_e4m3 --batches 2 --prefill 40 "
        f"--profile --seed 0 --device cpu --out {out}"
    )
    assert len(record["rows"]) == 8 and record["failed_rows"] == 0
    fields = {"geometry", "weights", "depth", "kv_dtype", "batch", "contender", "ms_per_token", "floor_ms"}
    assert all(fields <= set(row) and row["ms_per_token"] > 0 for row in record["rows"])


def test_the_list_names_the_geometries_and_runs_nothing() -> None:
    code, out, _ = run("bench", "e2e", "--list", "--device", "cpu")
    assert code == 0 and out.split() == [*GEOMETRIES, SMOLLM2]


def test_nothing_to_measure_is_exit_1_with_the_reason(model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.json"
    short.write_text(json.dumps(TINY | {"max_position_embeddings": 30}))
    code, out, _ = run("bench", "e2e", "--geometry", str(short), "--device", "cpu", "--depths", "40", "--json")
    assert code == 1
    reasons = {entry["reason"] for entry in json.loads(out)["not_measured"]}
    assert reasons == {"the model was made for 30 tokens"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--geometry", "qwen9"), "geometry: expected one of qwen3.5-0.8b"),
        (("--depths", "0"), "depths: expected numbers in 1..262139"),
        (("--depths", "262144"), "depths: expected numbers in 1..262139"),
        (("--batches", "1,x"), "batches: expected numbers in 1..1024"),
        (("--kv-dtypes", "int4"), "kv_dtypes: expected one of"),
        (("--prefill", "0"), "--prefill"),
        (("--device", "tpu"), "device: expected cuda or cpu"),
        (("--out", "/"), "out: expected a file in a writable folder"),
    ],
)
def test_bad_usage_is_exit_2_with_the_argument(words: tuple[str, ...], message: str) -> None:
    code, out, err = run("bench", "e2e", "--device", "cpu", *words)
    assert (code, out) == (2, "")
    assert message in flat(err) and "Traceback" not in err


def test_a_policy_of_the_environment_would_compare_it_with_itself() -> None:
    prelude = "import os; os.environ['SPLITKV_POLICY'] = 'auto'"
    done = script("bench", "e2e", "--device", "cpu", prelude=prelude)
    assert done.returncode == 2 and "SPLITKV_POLICY: expected unset" in flat(done.stderr)


def test_help_has_an_example() -> None:
    code, out, _ = run("bench", "e2e", "--help")
    assert code == 0 and "Example: splitkv bench e2e" in out
