"""`splitkv plan`: the library's own plans, in words, side by side and as JSON."""

import json
import os
import shlex

import pytest
from commandline import PLAN, flat, run, script

import splitkv
from splitkv.bench import planning


def test_plan_explains_one_policy() -> None:
    code, out, _ = run(*PLAN, "--device", "h200")
    assert code == 0
    for word in (
        "16/4 heads of 256",
        "policy",
        "splits",
        "grid",
        "workspace",
        "1073741824",
        "244.0 us",
        "invariant",
    ):
        assert word in out


def test_plan_compares_every_policy_in_100_columns() -> None:
    done = script(*PLAN, "--device", "h200", "--compare")
    assert done.returncode == 0, done.stderr
    for policy in planning.COMPARED:
        assert f" {policy.label} " in done.stdout
    assert "1.07 GB" in done.stdout and max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize("device", ["rtx4090", "gb10", "b200"])
def test_plan_json_is_the_librarys_own_plan(device: str) -> None:
    code, out, err = run(*PLAN, "--device", device, "--compare", "--json", "--batch", "3", "--kv-dtype", "fp8")
    record = json.loads(out)
    assert (code, err, record["schema"]) == (0, "", "splitkv.plan.v1")
    problem = splitkv.DecodeProblem(3, 16, 4, 256, kv_dtype="fp8")
    spec = splitkv.DeviceSpec.named(device)
    assert record["bytes_read"] == problem.kv_bytes() == 3 * 4 * 262_144 * 512
    assert record["floor_us"] == pytest.approx(problem.kv_bytes() / spec.bandwidth_bytes_s * 1e6, rel=1e-5)
    for policy, fields in zip(planning.COMPARED, record["plans"], strict=True):
        plan = splitkv.plan_decode(problem, spec, policy)
        assert (fields["policy"], fields["num_splits"], fields["split_len"]) == (
            policy.label,
            plan.num_splits,
            plan.split_len,
        )
        assert fields["grid"] == list(plan.grid) and fields["workspace_bytes"] == plan.workspace_bytes
        assert fields["batch_invariant"] is plan.batch_invariant and fields["why"].startswith("cut by ")


def test_plan_json_names_a_command_that_repeats_it() -> None:
    _, out, _ = run(*PLAN, "--device", "h200", "--policy", "length(128,64)", "--v-head-dim", "128", "--json")
    first = json.loads(out)
    name, *words = shlex.split(first["command"])
    assert name == "splitkv"
    assert json.loads(run(*words)[1])["plans"] == first["plans"]


def test_the_environment_overrides_a_policy_and_not_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_POLICY", "4")
    record = json.loads(run(*PLAN, "--device", "h200", "--policy", "waves", "--json")[1])
    assert record["environment_policy"] == "4" and record["command"].startswith("SPLITKV_POLICY=4 splitkv plan ")
    assert (record["plans"][0]["policy"], record["plans"][0]["from_environment"]) == ("pinned(4)", True)
    _, out, _ = run(*PLAN, "--device", "h200", "--compare")
    assert "waves" in out and "SPLITKV_POLICY=4 is set" in out
    assert os.environ["SPLITKV_POLICY"] == "4"


def test_plan_measures_a_current_device_without_a_datasheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitkv.DeviceSpec, "current", staticmethod(splitkv.DeviceSpec.cpu))
    monkeypatch.setattr(planning, "CURRENT_SWEEP_BYTES", 8 << 20)
    record = json.loads(run(*PLAN, "--json")[1])
    assert record["device"]["measured"] is True and record["floor_us"] > 0


def test_a_backend_that_cannot_take_the_call_is_exit_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_BACKEND", "cuda")
    code, out, err = run(*PLAN, "--device", "h200", "--q-dtype", "f32", "--kv-dtype", "bf16")
    assert (code, out) == (2, "") and "backend: cuda takes up to 16 query vectors" in flat(err)
