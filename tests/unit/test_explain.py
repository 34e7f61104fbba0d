"""What `DecodePlan.explain` says of a plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from test_plan import CASES, H200, Case, problem

from splitkv.plan import plan_decode
from splitkv.problem import DeviceSpec


@given(CASES)
def test_explain_says_everything(case: Case) -> None:
    policy, asked, device = case
    plan = case.plan
    facts = {line[:16].strip(): line[16:] for line in plan.explain().splitlines()}
    tile = plan.tile
    schedule = (str(plan.max_run), str(plan.target_units)) if plan.max_run > 1 else ("one split per block",)
    said: dict[str, tuple[object, ...]] = {
        "device": (device.name, device.sm_count),
        "policy": (policy.label, "as declared"),
        "splits": (plan.num_splits, plan.split_len, asked.capacity),
        "rule": (plan.rule.min_len, plan.rule.target, plan.rule.quantum),
        "schedule": schedule,
        "backend": (plan.backend,),
        "grid": (plan.grid, f"{plan.waves:.2f}"),
        "tile": (tile.block_n, tile.block_m, tile.num_warps, f"{plan.num_stages} stages", tile.compute),
        "workspace": (f"{plan.workspace_bytes} bytes",),
        "bytes read": (asked.kv_bytes(),),
        "floor": (f"{plan.floor_us:.1f} us", f"{device.bandwidth_bytes_s / 1e12:.2f} TB/s")
        if device.bandwidth_bytes_s
        else ("unknown",),
        "batch-invariant": ("yes" if policy.batch_invariant else "no",),
    }
    assert facts.keys() == said.keys()
    for name, parts in said.items():
        for part in parts:
            assert str(part) in facts[name]


def test_explain_names_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "(datasheet)" in plan_decode(problem(), DeviceSpec.named("h100")).explain()
    assert "(datasheet)" not in plan_decode(problem(), H200).explain()
    monkeypatch.setenv("SPLITKV_POLICY", "3")
    assert "pinned(3) (from SPLITKV_POLICY)" in plan_decode(problem(), H200).explain()
