"""The public names and promises of the contract, end to end on the CPU backend."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv import (
    DecodeAttention,
    DecodeProblem,
    DeviceSpec,
    SplitPolicy,
    decode_attention,
    plan_decode,
    prepared,
    reference_attention,
    workspace_bytes,
)

SRC = Path(splitkv.__file__).resolve().parents[1]

# ---- names and signatures ----------------------------------------------------------------------------------

NAMES = {
    "decode_attention", "merge_states", "reference_attention", "SplitPolicy", "DecodeProblem", "DeviceSpec",
    "plan_decode", "workspace_bytes", "DecodeAttention", "UnsupportedError", "plan_memory", "MemoryPlan",
}  # fmt: skip
CALL = (
    "q, k_cache, v_cache, seq_lens, *, block_table=None, softmax_scale=None, window=None, softcap=None, sinks=None, "
    "starts=None, mask=None, k_scale=None, v_scale=None, "
)
SIGNATURES = {
    decode_attention: f"({CALL}policy='auto', backend='auto', out=None, return_lse=False, workspace=None)",
    reference_attention: f"({CALL}policy=None, backend=None, out=None, return_lse=False, workspace=None, "
    "return_scores=False)",
    splitkv.merge_states: "(outs, lses)",
    plan_decode: "(problem, device, policy='auto', backend='auto', *, schedule=None)",
    workspace_bytes: "(problem, device, policy='auto')",
    splitkv.plan_memory: "(model, context, *, generated=0, free_bytes, total_bytes=None, unified=False, "
    "kv_dtypes=('f32', 'f16'), workspace_bytes=0, batch=1)",
    splitkv.MemoryPlan.largest_context: "(self, kv_dtype)",
    DecodeAttention: "(problem, policy='auto', device=None, *, schedule=None)",
    DecodeAttention.run: "(self, q, k_cache, v_cache, seq_lens, *, backend='auto', out=None, return_lse=False, "
    "**options)",
    SplitPolicy.auto: "()",
    SplitPolicy.waves: "()",
    SplitPolicy.capacity: "(chunk=None)",
    SplitPolicy.length: "(target=256, min_chunk=64)",
    SplitPolicy.legacy: "(ref_seqs=1)",
    SplitPolicy.pinned: "(n)",
    SplitPolicy.parse: "(text)",
    SplitPolicy.split: "(self, seq_len, problem, device)",
    DeviceSpec.named: "(name)",
    DeviceSpec.current: "(index=None)",
}


def test_names_are_public() -> None:
    assert set(splitkv.__all__) >= NAMES
    assert sorted(splitkv.__all__) == splitkv.__all__
    assert all(hasattr(splitkv, name) for name in splitkv.__all__)


@pytest.mark.parametrize(("function", "expected"), SIGNATURES.items(), ids=lambda x: getattr(x, "__qualname__", ""))
def test_signatures(function: Any, expected: str) -> None:
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == expected


def test_fields_and_properties() -> None:
    names = "batch num_q_heads num_kv_heads head_dim v_head_dim q_len capacity q_dtype kv_dtype page_size"
    assert [field.name for field in fields(DecodeProblem)] == names.split()
    for name in ("h200", "h100", "rtx4090", "gb10", "b200", "rtx5090", "a100"):
        device = DeviceSpec.named(name)
        assert device.name == name and device.sm_count > 0 and device.capability >= (8, 0)
        assert device.shared_memory_bytes > 0 and device.l2_bytes > 0 and device.bandwidth_bytes_s > 0
    plan = plan_decode(DecodeProblem(1, 8, 2, 128), DeviceSpec.named("h200"), SplitPolicy.auto())
    assert plan.num_splits > 1 and plan.split_len > 0 and len(plan.grid) == 3 and plan.batch_invariant
    assert "splits" in plan.explain()
    assert workspace_bytes(plan.problem, plan.device, "auto") == plan.workspace_bytes > 0


# ---- decode_attention --------------------------------------------------------------------------------------

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, CAPACITY = 3, 8, 2, 64, 48, 700
LENGTHS = torch.tensor([CAPACITY, 333, 0], dtype=torch.int32)
VARIABLES = ("SPLITKV_POLICY", "SPLITKV_BACKEND", "SPLITKV_GQA_PACK", "TRITON_INTERPRET")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Records (backend, plan) in place of launching."""
    recorded: list[tuple[str, Any]] = []
    monkeypatch.setattr(prepared, "preparer", lambda name: lambda **_: None)
    monkeypatch.setattr(prepared, "launcher", lambda name: lambda plan, **_: recorded.append((name, plan)))
    yield recorded


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def call(q_len: int | None = None, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    heads = (BATCH, Q_HEADS) if q_len is None else (BATCH, q_len, Q_HEADS)
    tensors = {
        "q": normal(*heads, HEAD_DIM, dtype=dtype),
        "k_cache": normal(BATCH, CAPACITY, KV_HEADS, HEAD_DIM, dtype=dtype),
        "v_cache": normal(BATCH, CAPACITY, KV_HEADS, V_HEAD_DIM, dtype=dtype),
    }
    return {**tensors, "seq_lens": LENGTHS, **changes}


def problem_of(arguments: dict[str, Any], **changes: Any) -> DecodeProblem:
    names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    q, dtype = arguments["q"], names[arguments["q"].dtype]
    q_len = 1 if q.ndim == 3 else q.shape[1]
    shape = {"batch": BATCH, "num_q_heads": Q_HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    shape |= {"v_head_dim": V_HEAD_DIM, "q_len": q_len, "capacity": CAPACITY}
    return DecodeProblem(**{**shape, "q_dtype": dtype, "kv_dtype": dtype, **changes})


def poisoned(plan: Any, extra: int = 0) -> Tensor:
    """A workspace of exactly the plan's bytes, every float in it NaN."""
    assert plan.splits and plan.workspace_bytes % 4 == 0
    return torch.full((plan.workspace_bytes // 4 + extra,), torch.nan)


TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("q_len", [None, 1, 4])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shapes_dtypes_and_values(q_len: int | None, dtype: torch.dtype) -> None:
    arguments = call(q_len, dtype)
    out, lse = decode_attention(**arguments, return_lse=True)
    expected_out, expected_lse = reference_attention(**arguments, return_lse=True)
    heads = tuple(arguments["q"].shape[:-1])
    assert out.shape == (*heads, V_HEAD_DIM) and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == heads and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-2)
    assert not out[2].any() and (lse[2] == -torch.inf).all()

    alone = decode_attention(**arguments)
    assert isinstance(alone, Tensor) and torch.equal(alone, out)


def test_three_and_four_dimensions_agree() -> None:
    three = decode_attention(**call(), return_lse=True)
    four = decode_attention(**{**call(), "q": call()["q"].unsqueeze(1)}, return_lse=True)
    assert all(torch.equal(a, b.squeeze(1)) for a, b in zip(three, four, strict=True))


def test_one_length_for_all_equals_a_tensor_of_it() -> None:
    expected = decode_attention(**call(seq_lens=torch.full((BATCH,), 333, dtype=torch.int32)))
    for lengths in (333, torch.full((BATCH,), 333, dtype=torch.int64)):
        assert torch.equal(decode_attention(**call(seq_lens=lengths)), expected)


def test_lengths_out_of_range_are_held_to_it() -> None:
    """A tensor's values are not checked on the host: above the capacity counts as the capacity, below 0 as 0."""
    wild = decode_attention(**call(seq_lens=torch.tensor([2**31 - 1, 333, -5], dtype=torch.int32)))
    assert torch.equal(wild, decode_attention(**call()))


@pytest.mark.parametrize("q_len", [None, 2])
def test_out_is_written_in_place_and_returned(q_len: int | None) -> None:
    arguments = call(q_len)
    expected, expected_lse = decode_attention(**arguments, return_lse=True)
    out = torch.full_like(expected, torch.nan)
    assert decode_attention(**arguments, out=out) is out and torch.equal(out, expected)

    buffer = torch.full((*expected.shape[:-1], V_HEAD_DIM + 16), torch.nan)
    out = buffer[..., :V_HEAD_DIM]  # gaps between its rows stay as they are
    result, lse = decode_attention(**arguments, out=out, return_lse=True)
    assert result is out and torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert buffer[..., V_HEAD_DIM:].isnan().all()


@pytest.mark.parametrize("policy", ["auto", "capacity", "length", "7", SplitPolicy.pinned(3)])
def test_workspace_of_exact_size_and_any_contents(policy: str | SplitPolicy) -> None:
    arguments = call(2)
    expected = decode_attention(**arguments, policy=policy)
    plan = plan_decode(problem_of(arguments), DeviceSpec.cpu(), policy)
    workspace, canary = poisoned(plan), poisoned(plan, extra=64)
    canary[-64:] = 123.0
    for scratch in (workspace, workspace.fill_(torch.inf).view(torch.uint8), canary):
        assert torch.equal(decode_attention(**arguments, policy=policy, workspace=scratch), expected)
    assert (canary[-64:] == 123.0).all()
    with pytest.raises(ValueError, match=f"workspace: .*{plan.workspace_bytes} bytes, got {plan.workspace_bytes - 4}"):
        decode_attention(**arguments, policy=policy, workspace=workspace[:-1])


def test_inputs_are_left_alone() -> None:
    arguments = call(2, mask=normal(CAPACITY), sinks=normal(Q_HEADS))
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    decode_attention(**arguments)
    assert all(torch.equal(arguments[name], tensor) for name, tensor in before.items())


# ---- DecodeAttention ---------------------------------------------------------------------------------------


def test_object_equals_the_call_and_reuses_its_workspace() -> None:
    arguments = call(2)
    attend = DecodeAttention(problem_of(arguments), policy="pinned(5)", device="cpu")
    assert attend.plan == plan_decode(problem_of(arguments), DeviceSpec.cpu(), "pinned(5)")
    assert attend.workspace.nbytes == attend.plan.workspace_bytes
    assert attend.workspace.nbytes == workspace_bytes(attend.problem, DeviceSpec.cpu(), "pinned(5)") > 0

    address, out = attend.workspace.data_ptr(), torch.empty(BATCH, 2, Q_HEADS, V_HEAD_DIM)
    for options in ({}, {"window": 100, "softcap": 5.0}, {"sinks": normal(Q_HEADS), "seq_lens": 40}):
        attend.workspace.view(torch.float32).fill_(torch.nan)
        expected = decode_attention(**{**arguments, **options}, policy="pinned(5)", return_lse=True)
        actual = attend.run(**{**arguments, **options}, out=out, return_lse=True)
        assert actual[0] is out and all(map(torch.equal, actual, expected))
        assert not attend.workspace.view(torch.float32).isnan().all()  # its own was used
        assert torch.equal(attend.run(**{**arguments, **options}), expected[0])
    assert attend.workspace.data_ptr() == address


def test_object_without_a_policy_is_auto() -> None:
    attend = DecodeAttention(problem_of(call()), device="cpu")
    assert attend.plan.policy == SplitPolicy.auto()
    assert torch.equal(attend.run(**call()), decode_attention(**call()))


@pytest.mark.parametrize(
    "changes",
    [{"capacity": CAPACITY + 1}, {"batch": BATCH + 1}, {"q_len": 2}, {"v_head_dim": 64}, {"q_dtype": "bf16"}],
    ids=str,
)
def test_object_refuses_another_problem(changes: dict[str, Any], launched: list[Any]) -> None:
    attend = DecodeAttention(problem_of(call(), **changes), device="cpu")
    with pytest.raises(ValueError, match=r"run: expected tensors of DecodeProblem.*, got DecodeProblem") as caught:
        attend.run(**call())
    [(name, value)] = changes.items()
    assert f"{name}={value!r}" in str(caught.value) and launched == []


def test_object_refuses_what_the_call_refuses(launched: list[Any]) -> None:
    attend = DecodeAttention(problem_of(call()), device="cpu")
    for change, error, words in (
        ({"window": -1}, ValueError, "window: .*-1"),
        ({"out": torch.empty(1)}, ValueError, "out: expected shape"),
        ({"backend": "tpu"}, ValueError, "backend: .*'tpu'"),
        ({"backend": "cuda"}, ValueError, "backend: cuda expects CUDA tensors, got cpu"),
        ({"workspace": torch.empty(1)}, TypeError, "workspace"),  # it has its own
        ({"policy": "auto"}, TypeError, "policy"),
    ):
        with pytest.raises(error, match=words):
            attend.run(**{**call(), **change})
    elsewhere = {name: tensor.to("meta") for name, tensor in call().items()}
    with pytest.raises(ValueError, match="q: expected device cpu of this DecodeAttention, got meta"):
        attend.run(**elsewhere)
    with pytest.raises(ValueError, match=r"policy: .*'fast'"):
        DecodeAttention(problem_of(call()), policy="fast", device="cpu")
    with pytest.raises(TypeError, match="problem: expected a DecodeProblem, got dict"):
        DecodeAttention({"batch": 1}, device="cpu")  # type: ignore[arg-type]
    assert launched == []


# ---- environment variables ---------------------------------------------------------------------------------


def test_policy_variable_wins_over_every_declaration(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    monkeypatch.setenv("SPLITKV_POLICY", " Pinned(3) ")
    for policy in ("auto", "waves", SplitPolicy.length()):
        decode_attention(**call(), policy=policy)
        plan = launched.pop()[1]
        assert plan.policy == SplitPolicy.pinned(3) and plan.from_environment
    plan = DecodeAttention(problem_of(call()), device="cpu").plan
    assert plan.policy == SplitPolicy.pinned(3)
    assert workspace_bytes(problem_of(call()), DeviceSpec.cpu(), "auto") == plan.workspace_bytes

    monkeypatch.setenv("SPLITKV_POLICY", "nonsense")
    with pytest.warns(UserWarning, match="SPLITKV_POLICY='nonsense' names no policy"):
        decode_attention(**call(), policy="waves")
    assert launched.pop()[1].policy == SplitPolicy.waves()


def test_policy_variable_changes_the_answer_no_more_than_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decode_attention(**call(), policy="pinned(5)")
    monkeypatch.setenv("SPLITKV_POLICY", "pinned(5)")
    assert torch.equal(decode_attention(**call()), expected)


@pytest.mark.parametrize(
    ("variable", "argument", "chosen"),
    [
        ("rowwise", "auto", "rowwise"),
        (" Triton ", "auto", "triton"),
        ("cpu", "auto", "cpu"),
        ("auto", "auto", "cpu"),
        ("", "auto", "cpu"),
        ("triton", "cpu", "cpu"),
    ],
)
def test_backend_variable_stands_in_for_auto_alone(
    variable: str, argument: str, chosen: str, monkeypatch: pytest.MonkeyPatch, launched: list[Any]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # lets Triton's backends take CPU tensors
    monkeypatch.setenv("SPLITKV_BACKEND", variable)
    decode_attention(**call(), backend=argument)
    assert [name for name, _ in launched] == [chosen]


def test_backend_variable_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    monkeypatch.setenv("SPLITKV_BACKEND", "triton")
    with pytest.raises(ValueError, match="backend: triton expects CUDA tensors, got cpu"):
        decode_attention(**call())
    assert launched == []


def test_pack_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off, every query head has a block of its own; the answer is as right."""
    group = Q_HEADS // KV_HEADS
    for text, rows in (("0", 1), ("off", 1), ("1", group), ("", group), ("maybe", group)):
        monkeypatch.setenv("SPLITKV_GQA_PACK", text)
        attend = DecodeAttention(problem_of(call()), device="cpu")
        assert attend.plan.rows_per_block == rows
        expected = reference_attention(**call())
        for out in (attend.run(**call()), decode_attention(**call())):
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


# ---- without Triton ----------------------------------------------------------------------------------------

WITHOUT_TRITON = """
import sys
import torch  # first: it may look for Triton on its own account
sys.modules["triton"] = None  # makes any import of it fail
import splitkv
k = torch.ones(1, 5, 1, 16)
print(splitkv.decode_attention(torch.ones(1, 2, 16), k, k, 5).sum().item())
"""


def test_runs_on_the_cpu_without_triton() -> None:
    env = {**{name: text for name, text in os.environ.items() if name not in VARIABLES}, "PYTHONPATH": str(SRC)}
    result = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "32.0"
