"""One case, checked: what comes out, what was written beside it, and whether another memory layout gives other bytes.

`start` launches a case's calls and `finish` reads them, so that a GPU is waited for once per batch of cases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import splitkv

from ...plan import DecodePlan, plan_decode
from ...problem import DeviceSpec
from .cases import Case, Geometry
from .oracle import Truth, solve
from .tensors import BAND_BYTES, BITS, Call, Values, make_values

GPU_WORK = 3e7
"""Multiply-adds from which the float64 of a case is computed on the GPU that runs it."""

ORACLES_AGREE = 1e-10
"""Largest difference between two float64 computations of one answer."""
GPU_LOST = re.compile(r"CUDA error|Triton Error \[CUDA\]")
"""An error after which a process cannot use its GPU again."""
SMALLEST = 1e-300
"""Stands for a bound of 0, which an error of 0 keeps to."""


class Reserving(TorchFunctionMode):
    """While active, torch.empty and new_empty hand out a call's guarded places where one fits: out, lse, workspace."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, Tensor.new_empty):
            sizes = args[1:] if func is Tensor.new_empty else args
            default = args[0].dtype if func is Tensor.new_empty else torch.float32
            shape = tuple(sizes[0]) if isinstance(sizes[0], tuple | list) else tuple(sizes)
            place = self.call.reserve(shape, kwargs.get("dtype", default))
            if place is not None:
                return place
        return func(*args, **kwargs)


@dataclass
class Finding:
    """What one case gave. failures: one line each. refusal: why it was not computed. ratios: largest error over its
    bound, for "out", "row" and "lse"."""

    failures: list[str] = field(default_factory=list)
    refusal: str | None = None
    twin_refusal: str | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    twin_checked: bool = False


@dataclass
class _Launched:
    """A call under way, and copies of its results that will have come to the CPU when the GPU has been waited for.

    inputs_same: whether the arena's inputs are what they were. written: the arena from `written_from` on.
    """

    call: Call
    out: Tensor
    lse: Tensor | None
    inputs_same: Tensor
    written: Tensor


@dataclass
class Started:
    """A case whose calls are under way."""

    case: Case
    values: Values
    finding: Finding
    device: str
    base: _Launched | None = None
    twin: _Launched | None = None
    truth: Truth | None = None


def check(case: Case, backend: str, device: str, with_reference: bool = False) -> Finding:
    """Run one case and judge it, and with_reference also the float64 that it is held against."""
    started = start(case, backend, device)
    finding = finish(started)
    if with_reference:
        finding.failures += compare_with_reference(started)
    return finding


def start(case: Case, backend: str, device: str) -> Started:
    """Launch the calls of a case. Nothing is read back yet."""
    started = Started(case, make_values(case), Finding(), device)
    finding = started.finding
    started.base, finding.refusal = _launch(started, case.base, tuple(range(case.base.batch)), backend, "first call")
    if started.base is not None and case.twin is not None:
        started.twin, finding.twin_refusal = _launch(started, case.twin, case.twin_rows, backend, "second call")
    return started


def _launch(
    started: Started, geometry: Geometry, rows: tuple[int, ...], backend: str, which: str
) -> tuple[_Launched | None, str | None]:
    """(what was launched, why it was refused). Any other error than UnsupportedError is a failure: cases are legal."""
    case = started.case
    plan = _plan(case, geometry, backend, started.device)
    call = Call(case, started.values, geometry, rows, plan.workspace_bytes, started.device)
    try:
        with Reserving(call):
            result = splitkv.decode_attention(**call.arguments, backend=backend)
    except splitkv.UnsupportedError as error:
        return None, re.sub(r"-?(0x[0-9a-f]+|\d+)", "N", str(error))
    except Exception as error:
        if GPU_LOST.search(str(error)):
            raise
        started.finding.failures.append(f"{which}: {type(error).__name__}: {error}")
        return None, None
    out, lse = result if isinstance(result, tuple) else (result, None)
    inputs = call.arena[: call.written_from].view(torch.int64) == call.inputs_before.view(torch.int64)
    return _Launched(
        call,
        _to_cpu(out),
        None if lse is None else _to_cpu(lse),
        _to_cpu(inputs.all()),
        _to_cpu(call.arena[call.written_from :]),
    ), None


def _to_cpu(tensor: Tensor) -> Tensor:
    """A copy on the CPU, under way."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=True)


def _plan(case: Case, geometry: Geometry, backend: str, device: str) -> DecodePlan:
    """The plan that the call will use, for its workspace."""
    problem = case.problem(geometry)
    try:
        return plan_decode(problem, device_spec(device), case.policy, backend)
    except ValueError:  # backend cuda does not take it, as the call will say
        return plan_decode(problem, device_spec(device), case.policy, "triton")


@cache
def device_spec(device: str) -> DeviceSpec:
    return DeviceSpec.cpu() if device == "cpu" else DeviceSpec.current()


def finish(started: Started) -> Finding:
    """Judge what `start` launched."""
    case, finding = started.case, started.finding
    if started.base is None:
        return finding
    work = case.base.batch * case.num_q_heads * case.queries * started.values.k.shape[1] * case.head_dim
    truth = started.truth = solve(case, started.values, started.device if work > GPU_WORK else "cpu")
    queries = case.queries
    base, twin = started.base, started.twin
    out, lse = base.out, base.lse
    finding.failures += _judge(
        out.view(-1, queries, *out.shape[-2:]),
        None if lse is None else lse.view(-1, queries, lse.shape[-1]),
        truth,
        finding,
    )
    finding.failures += [f"first call: {text}" for text in _written_beside(base)]
    if twin is not None:
        finding.twin_checked = True
        finding.failures += [f"second call: {text}" for text in _written_beside(twin)]
        for name, ours, theirs in (
            ("out", out, twin.out),
            ("lse", lse, twin.lse),
        ):
            if ours is not None and theirs is not None:
                finding.failures += _same_rows(name, ours, theirs, case.twin_rows)
    return finding


def compare_with_reference(started: Started) -> list[str]:
    """One line if the float64 that this case was held against is not that of splitkv.reference_attention."""
    if started.base is None or started.truth is None:
        return []
    arguments = {name: value for name, value in started.base.call.arguments.items() if name not in ("out", "workspace")}
    for name in ("k_scale", "v_scale"):
        if isinstance(arguments.get(name), Tensor) and arguments[name].numel() == 1:
            arguments[name] = arguments[name].reshape(())
    out, lse = cast(tuple[Tensor, Tensor], splitkv.reference_attention(**(arguments | {"return_lse": True})))
    truth, failures = started.truth, []
    for name, theirs, ours in (("out", out, truth.out), ("lse", lse, truth.lse)):
        if not torch.allclose(theirs.view(ours.shape), ours, rtol=ORACLES_AGREE, atol=ORACLES_AGREE):
            failures.append(f"oracle: {name} is not that of splitkv.reference_attention")
    return failures


def _judge(out: Tensor, lse: Tensor | None, truth: Truth, finding: Finding) -> list[str]:
    failures = []
    error = (out.double() - truth.out).abs()
    if not out.isfinite().all():
        failures.append(f"out: {int((~out.isfinite()).sum())} values are not finite")
    empty = truth.lse == -torch.inf
    if out[empty].any():
        failures.append("out: not 0 where nothing is visible")
    failures += _over("out", error, truth.out_bound, finding)
    rows = error.flatten(1).norm(dim=1)
    failures += _over("row", rows, truth.row_bound, finding)
    if lse is not None:
        if not torch.equal(lse == -torch.inf, empty):
            failures.append("lse: -inf in other places than in float64")
        error = (lse.double() - truth.lse).abs().masked_fill(empty, 0.0)
        failures += _over("lse", error, truth.lse_bound, finding)
    return failures


def _over(name: str, error: Tensor, bound: Tensor, finding: Finding) -> list[str]:
    """One line if an error passes its bound, and where it does so most; NaN does."""
    ratio = torch.nan_to_num(error / bound.clamp_min(SMALLEST), nan=torch.inf)
    worst = float(ratio.max())
    finding.ratios[name] = worst
    if worst <= 1.0:
        return []
    place = [int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape)]
    found, most = float(error[tuple(place)]), float(bound[tuple(place)])
    return [f"{name}: error {found:.3g} over the bound {most:.3g} at {place}"]


def _written_beside(launched: _Launched) -> list[str]:
    """Whether any byte changed but those of out, lse and scratch."""
    call = launched.call
    failures = []
    split = call.written_from
    if not launched.inputs_same:
        changed = int((call.arena[:split] != call.inputs_before).nonzero()[0])
        failures.append(f"inputs: bytes changed at or beside {_beside(call, changed)}")
    after, before = launched.written, call.before[split:].clone()
    for name in ("out", "lse", "workspace"):
        if name in call.layouts:
            layout = call.layouts[name]
            bits = BITS[layout.dtype.itemsize]
            place = (call.places[name] - split) // layout.dtype.itemsize
            views = [x.view(bits).as_strided(layout.sizes, layout.strides, place) for x in (after, before)]
            views[1].copy_(views[0])
    if not torch.equal(after, before):
        changed = int((after != before).nonzero()[0]) + split
        failures.append(f"guard: bytes changed beside {_beside(call, changed)}")
    return failures


def _beside(call: Call, byte: int) -> str:
    """The last tensor that starts at most a band after this byte of the arena."""
    return max((place, name) for name, place in call.places.items() if place <= byte + BAND_BYTES)[1]


def _same_rows(name: str, ours: Tensor, theirs: Tensor, rows: tuple[int, ...]) -> list[str]:
    bits = BITS[ours.element_size()]
    wanted = ours[torch.tensor(rows)].contiguous().view(bits)
    same = (wanted == theirs.contiguous().view(bits)).flatten(1).all(1)
    if same.all():
        return []
    row = int((~same).nonzero()[0])
    difference = float((ours[rows[row]].double() - theirs[row].double()).abs().max())
    return [f"bytes: {name} of row {rows[row]} differs by {difference:.3g} as row {row} of the second call"]
