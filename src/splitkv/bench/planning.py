"""`splitkv plan`: what a decode call would launch on a device, for one policy or for all of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ..plan import DecodePlan, plan_decode
from ..policy import POLICY_VARIABLE, SplitPolicy
from ..problem import MAX_CONTEXT, Q_DTYPES, DecodeProblem, DeviceSpec, dtype_name
from . import record
from .cases import parse_heads

SCHEMA = "splitkv.plan.v1"
COMPARED = (
    SplitPolicy.auto(),
    SplitPolicy.waves(),
    SplitPolicy.capacity(),
    SplitPolicy.length(),
    SplitPolicy.legacy(),
    SplitPolicy.pinned(16),
    SplitPolicy.pinned(1),
)
READS = {
    "auto": "the row's own length",
    "waves": "the row's own length and the SM count",
    "capacity": "the capacity and the number of rows",
    "length": "the row's own length",
    "legacy": "the number of rows and the SM count",
    "pinned": "the row's own length",
}
"""What decides where a row is cut, and so which bytes come out; the head geometry is always part of it."""
CURRENT_SWEEP_BYTES = 256 << 20
"""Read to learn the bandwidth of a current device that no datasheet entry covers."""


@dataclass(frozen=True)
class PlanRequest:
    """What `splitkv plan` is asked for. policy: None for every policy in turn."""

    problem: DecodeProblem
    device: DeviceSpec
    policy: SplitPolicy | None


def plan_request(
    heads: str,
    head_dim: int,
    context: int,
    device: str,
    *,
    v_head_dim: int = 0,
    batch: int = 1,
    q_len: int = 1,
    kv_dtype: str = "bf16",
    q_dtype: str | None = None,
    page_size: int | None = None,
    policy: str = "auto",
    compare: bool = False,
) -> PlanRequest:
    """The request from its text forms; ValueError names the option. Default q_dtype: the KV dtype or bf16."""
    num_q_heads, num_kv_heads = parse_heads(heads)
    if not 0 <= context <= MAX_CONTEXT:
        raise ValueError(f"context: expected 0..{MAX_CONTEXT} tokens, got {context}")
    kv = dtype_name(kv_dtype)
    chosen = SplitPolicy.parse(policy)
    if chosen is None:
        raise ValueError(
            "policy: expected auto, waves, capacity, length, legacy, off, a number of splits or a label such "
            f"as pinned(16), got {policy!r}"
        )
    problem = DecodeProblem(
        batch=batch,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q_len=q_len,
        capacity=context,
        q_dtype=q_dtype or (kv if kv in Q_DTYPES else "bf16"),
        kv_dtype=kv,
        page_size=page_size,
    )
    return PlanRequest(problem, resolve_spec(device), None if compare else chosen)


def resolve_spec(device: str) -> DeviceSpec:
    """A known GPU by name, or "current": this machine's, its bandwidth measured if no datasheet names it."""
    if device.strip().lower() != "current":
        try:
            return DeviceSpec.named(device)
        except ValueError as error:
            raise ValueError(str(error).replace("expected one of", "expected current or one of")) from None
    spec = DeviceSpec.current()
    if spec.bandwidth_bytes_s:
        return spec
    from .roofline import read_bandwidth

    return spec.with_bandwidth(read_bandwidth("cpu" if spec.is_cpu else "cuda", CURRENT_SWEEP_BYTES).bytes_per_s)


def make_plans(request: PlanRequest) -> list[DecodePlan]:
    """The plan of the requested policy (or SPLITKV_POLICY, as in a launch), or of each compared one."""
    if request.policy is not None:
        return [plan_decode(request.problem, request.device, request.policy)]
    with _without_policy_variable():
        return [plan_decode(request.problem, request.device, policy) for policy in COMPARED]


@contextmanager
def _without_policy_variable() -> Iterator[None]:
    """A comparison shows each policy for what it is, whatever the environment would make of it."""
    text = os.environ.pop(POLICY_VARIABLE, None)
    try:
        yield
    finally:
        if text is not None:
            os.environ[POLICY_VARIABLE] = text


def why_invariant(plan: DecodePlan) -> str:
    """Where the splits come from, in one phrase."""
    return f"cut by {READS[plan.policy.kind]}"


def plan_record(request: PlanRequest, plans: list[DecodePlan], command: str) -> dict[str, Any]:
    """The JSON form: problem, device, bytes read, floor (null if the bandwidth is unknown), plans."""
    floor_us = plans[0].floor_us
    return {
        "schema": SCHEMA,
        **record.provenance(),
        "command": command,
        "problem": asdict(request.problem),
        "device": asdict(request.device),
        "bytes_read": request.problem.kv_bytes(),
        "floor_us": None if math.isnan(floor_us) else floor_us,
        "environment_policy": os.environ.get(POLICY_VARIABLE),
        "plans": [_plan_fields(plan) for plan in plans],
    }


def _plan_fields(plan: DecodePlan) -> dict[str, Any]:
    return {
        "policy": plan.policy.label,
        "from_environment": plan.from_environment,
        "num_splits": plan.num_splits,
        "split_len": plan.split_len,
        "max_splits": plan.max_splits,
        "grid": list(plan.grid),
        "blocks_per_sm": plan.waves,
        "workspace_bytes": plan.workspace_bytes,
        "batch_invariant": plan.batch_invariant,
        "why": why_invariant(plan),
        "rule": asdict(plan.rule),
        "tile": asdict(plan.tile),
        "schedule": asdict(plan.schedule),
        "schedule_source": plan.schedule_source,
    }
