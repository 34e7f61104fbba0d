"""DecodeProblem and DeviceSpec: the values a plan is made from, and what they refuse. All without torch."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import splitkv.problem
from splitkv.plan import plan_decode
from splitkv.problem import (
    DTYPE_BYTES,
    KNOWN_DEVICES,
    MAX_CONTEXT,
    DecodeProblem,
    DeviceSpec,
    dtype_name,
)


def problem(**changes: Any) -> DecodeProblem:
    fields: dict[str, Any] = dict(batch=2, num_q_heads=16, num_kv_heads=4, head_dim=256)
    return DecodeProblem(**(fields | changes))


def test_defaults() -> None:
    assert problem() == DecodeProblem(
        batch=2,
        num_q_heads=16,
        num_kv_heads=4,
        head_dim=256,
        v_head_dim=256,
        q_len=1,
        capacity=262_144,
        q_dtype="bf16",
        kv_dtype="bf16",
        page_size=None,
    )
    assert MAX_CONTEXT == 262_144


def test_fields_are_in_the_order_of_the_contract() -> None:
    names = "batch num_q_heads num_kv_heads head_dim v_head_dim q_len capacity q_dtype kv_dtype page_size"
    assert [field.name for field in dataclasses.fields(DecodeProblem)] == names.split()


@pytest.mark.parametrize(
    ("changes", "group", "rows", "bytes_per_key"),
    [
        ({}, 4, 4, 1024),
        ({"q_len": 5}, 4, 20, 1024),
        ({"kv_dtype": "f32"}, 4, 4, 2048),
        ({"kv_dtype": "fp8", "num_q_heads": 24, "q_len": 16}, 6, 96, 512),
        ({"num_q_heads": 128, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512}, 128, 128, 2176),
        ({"num_q_heads": 4, "head_dim": 192, "v_head_dim": 128, "kv_dtype": "fp8_e5m2"}, 1, 1, 320),
    ],
)
def test_derived_sizes(changes: dict[str, Any], group: int, rows: int, bytes_per_key: int) -> None:
    made = problem(**changes)
    assert (made.group_size, made.rows_per_kv_head, made.kv_bytes_per_key) == (group, rows, bytes_per_key)
    assert made.kv_bytes(1000) == 2 * made.num_kv_heads * 1000 * bytes_per_key
    assert made.kv_bytes() == made.kv_bytes(262_144)
    assert made.kv_bytes(0) == 0


def test_sizes_do_not_overflow() -> None:
    huge = problem(batch=1 << 20, num_q_heads=64, num_kv_heads=64, kv_dtype="f32")
    assert huge.kv_bytes() == (1 << 20) * 64 * 262_144 * 2048


@pytest.mark.parametrize("given,canonical", [("fp8", "fp8_e4m3"), ("e4m3", "fp8_e4m3"), ("e5m2", "fp8_e5m2")])
def test_short_dtype_names(given: str, canonical: str) -> None:
    assert dtype_name(given) == canonical
    assert problem(kv_dtype=given) == problem(kv_dtype=canonical)


@pytest.mark.parametrize("name,size", [("f32", 4), ("f16", 2), ("bf16", 2), ("fp8_e4m3", 1), ("fp8_e5m2", 1)])
def test_every_dtype_has_its_size(name: str, size: int) -> None:
    assert dtype_name(name) == name
    assert DTYPE_BYTES[name] == size
    assert len(DTYPE_BYTES) == 5


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64])
@pytest.mark.parametrize("kv_heads", [1, 2, 5])
def test_any_integer_ratio_of_heads(group: int, kv_heads: int) -> None:
    assert problem(num_q_heads=group * kv_heads, num_kv_heads=kv_heads).group_size == group


@pytest.mark.parametrize(
    ("changes", "field", "expected", "got"),
    [
        ({"batch": 0}, "batch", "at least 1", "0"),
        ({"batch": -3}, "batch", "at least 1", "-3"),
        ({"num_q_heads": 0}, "num_q_heads", "at least 1", "0"),
        ({"num_q_heads": 0, "num_kv_heads": 1}, "num_q_heads", "at least 1", "0"),
        ({"num_kv_heads": 0}, "num_kv_heads", "at least 1", "0"),
        ({"head_dim": 0}, "head_dim", "at least 1", "0"),
        ({"v_head_dim": -16}, "v_head_dim", "at least 1", "-16"),
        ({"q_len": 0}, "q_len", "at least 1", "0"),
        ({"capacity": -1}, "capacity", "at least 0", "-1"),
        ({"page_size": 0}, "page_size", "at least 1 or None", "0"),
        ({"num_q_heads": 7, "num_kv_heads": 2}, "num_q_heads", "a multiple of num_kv_heads (2)", "7"),
        ({"num_q_heads": 2, "num_kv_heads": 4}, "num_q_heads", "a multiple of num_kv_heads (4)", "2"),
        ({"num_q_heads": 25, "num_kv_heads": 4}, "num_q_heads", "a multiple of num_kv_heads (4)", "25"),
        ({"q_dtype": "fp8"}, "q_dtype", "one of f32, f16, bf16", "fp8_e4m3"),
        ({"q_dtype": "half"}, "q_dtype", "one of f32, f16, bf16", "'half'"),
        ({"kv_dtype": "int8"}, "kv_dtype", "one of f32, f16, bf16, fp8_e4m3, fp8_e5m2 (or fp8)", "'int8'"),
        ({"kv_dtype": None}, "kv_dtype", "one of f32", "None"),
        ({"batch": 1.5}, "batch", "an integer", "1.5"),
        ({"num_kv_heads": 4.0}, "num_kv_heads", "an integer", "4.0"),
        ({"head_dim": "256"}, "head_dim", "an integer", "'256'"),
        ({"v_head_dim": None}, "v_head_dim", "an integer", "None"),
        ({"capacity": 4096.0}, "capacity", "an integer", "4096.0"),
        ({"capacity": None}, "capacity", "an integer", "None"),
        ({"page_size": 16.0}, "page_size", "an integer", "16.0"),
    ],
    ids=repr,
)
def test_refusals_name_field_expected_and_got(changes: dict[str, Any], field: str, expected: str, got: str) -> None:
    with pytest.raises(ValueError) as error:
        problem(**changes)
    text = str(error.value)
    assert text.startswith(f"{field}: expected {expected}"), text
    assert text.endswith(f"got {got}"), text


def test_integers_of_other_types_become_int() -> None:
    """So that equal problems hash, print and plan alike whatever library their numbers came from."""
    numpy = pytest.importorskip("numpy")
    made = problem(batch=numpy.int64(2), capacity=numpy.int32(4096), page_size=numpy.int64(16))
    assert made == problem(capacity=4096, page_size=16)
    assert {type(made.batch), type(made.capacity), type(made.page_size)} == {int}


def test_values_are_frozen_and_hashable() -> None:
    assert {problem(): 1, DeviceSpec.named("h200"): 2}[problem()] == 1
    for value in (problem(), DeviceSpec.named("h200")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, 3)


# ---------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("name", "sm_count", "capability", "shared_kib"),
    [
        ("h200", 132, (9, 0), 227),
        ("h100", 132, (9, 0), 227),
        ("a100", 108, (8, 0), 163),
        ("rtx4090", 128, (8, 9), 99),
        ("rtx5090", 170, (12, 0), 99),
        ("gb10", 48, (12, 1), 99),
        ("b200", 148, (10, 0), 227),
    ],
)
def test_named_devices(name: str, sm_count: int, capability: tuple[int, int], shared_kib: int) -> None:
    spec = DeviceSpec.named(name)
    assert spec.name == name
    assert (spec.sm_count, spec.capability) == (sm_count, capability)
    assert spec.shared_memory_bytes == shared_kib * 1024
    assert 10 << 20 < spec.l2_bytes < 1 << 30
    assert 0.2e12 < spec.bandwidth_bytes_s <= 8e12
    assert not spec.is_cpu
    assert spec.measured == (name == "h200")


def test_all_named_devices_are_tested_above() -> None:
    assert set(KNOWN_DEVICES) == {"h200", "h100", "a100", "rtx4090", "rtx5090", "gb10", "b200"}


@pytest.mark.parametrize("text", ["H200", " h200 ", "RTX 4090", "rtx-4090", "Rtx 5090", "GB10"])
def test_device_names_in_any_case_and_spacing(text: str) -> None:
    assert DeviceSpec.named(text).name == text.lower().replace(" ", "").replace("-", "")


@pytest.mark.parametrize("text", ["v100", "", "h2000", "cuda:0"])
def test_an_unknown_device_lists_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError) as error:
        DeviceSpec.named(text)
    message = str(error.value)
    assert message.startswith("device: expected one of ")
    assert message.endswith(f"got {text!r}")
    assert all(name in message for name in KNOWN_DEVICES)


def test_cpu_counts_the_cores_this_process_may_use() -> None:
    spec = DeviceSpec.cpu()
    assert spec.is_cpu
    assert spec.name == "cpu"
    assert 1 <= spec.sm_count <= (os.cpu_count() or 1)
    assert (spec.shared_memory_bytes, spec.l2_bytes, spec.bandwidth_bytes_s) == (0, 0, 0.0)


def test_with_bandwidth_changes_nothing_else() -> None:
    spec = DeviceSpec.named("h100")
    measured = spec.with_bandwidth(3.0e12)
    assert (measured.bandwidth_bytes_s, measured.measured) == (3.0e12, True)
    assert dataclasses.replace(measured, bandwidth_bytes_s=3.35e12, measured=False) == spec


class FakeCuda:
    """As much of torch.cuda as `DeviceSpec.current` reads."""

    def __init__(self, *names: str, sm_count: int = 132, capability: tuple[int, int] = (9, 0)) -> None:
        self.names = names
        self.sm_count, self.capability = sm_count, capability

    def is_available(self) -> bool:
        return bool(self.names)

    def current_device(self) -> int:
        return len(self.names) - 1

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name=self.names[index],
            multi_processor_count=self.sm_count + index,
            major=self.capability[0],
            minor=self.capability[1],
            shared_memory_per_block_optin=200_000,
            L2_cache_size=50_000_000,
        )


def use_fake_torch(monkeypatch: pytest.MonkeyPatch, *names: str, **made: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=FakeCuda(*names, **made)))


def test_current_is_the_cpu_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_torch(monkeypatch)
    assert DeviceSpec.current() == DeviceSpec.cpu()


def test_current_reads_the_current_device_or_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_torch(monkeypatch, "NVIDIA H200", "NVIDIA Nonesuch 9000")
    monkeypatch.setattr(splitkv.problem, "compiles_cuda", lambda: True)
    assert DeviceSpec.current() == DeviceSpec("NVIDIA Nonesuch 9000", 133, (9, 0), 200_000, 50_000_000, 0.0, False)
    assert DeviceSpec.current(0) == DeviceSpec("NVIDIA H200", 132, (9, 0), 200_000, 50_000_000, 4.4e12, True)


def test_current_asks_the_installation_and_named_devices_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_torch(monkeypatch, "NVIDIA H200")
    for able in (True, False):
        monkeypatch.setattr(splitkv.problem, "compiles_cuda", lambda able=able: able)
        assert DeviceSpec.current().compiles_cuda is able and DeviceSpec.named("h200").compiles_cuda


@pytest.mark.parametrize("missing", ["cuda", "cuda.bindings"])
def test_without_cuda_bindings_nothing_compiles(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # earlier tests may have imported it
    monkeypatch.setitem(sys.modules, missing, None)
    assert not splitkv.problem.compiles_cuda.__wrapped__()


@pytest.mark.parametrize(
    ("product", "known"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB10", "gb10"),
    ],
)
def test_current_takes_the_bandwidth_of_a_known_product(
    monkeypatch: pytest.MonkeyPatch, product: str, known: str
) -> None:
    expected = KNOWN_DEVICES[known]
    use_fake_torch(monkeypatch, product, sm_count=expected.sm_count, capability=expected.capability)
    spec = DeviceSpec.current()
    assert spec.bandwidth_bytes_s == expected.bandwidth_bytes_s
    assert not spec.measured
    use_fake_torch(monkeypatch, product, sm_count=expected.sm_count - 2, capability=expected.capability)
    assert DeviceSpec.current().bandwidth_bytes_s == 0.0  # a cut-down relative, whose memory is another


NO_TORCH = """
import importlib, sys, types
for name in ("torch", "triton"):
    sys.modules[name] = None  # importing it raises ImportError
package = types.ModuleType("splitkv")
package.__path__ = [sys.argv[1]]
sys.modules["splitkv"] = package
plan = importlib.import_module("splitkv.plan")
problem = importlib.import_module("splitkv.problem")
asked = problem.DecodeProblem(1, 16, 4, 256)
made = plan.plan_decode(asked, problem.DeviceSpec.named("h200"))
print(made.workspace_bytes, made.explain())
"""


def test_planning_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPLITKV_POLICY", raising=False)
    command = [sys.executable, "-c", NO_TORCH, str(Path(splitkv.problem.__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    made = plan_decode(DecodeProblem(1, 16, 4, 256), DeviceSpec.named("h200"))
    assert result.stdout == f"{made.workspace_bytes} {made.explain()}\n"
