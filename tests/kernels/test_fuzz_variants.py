"""A pooled fuzz shape needs one compilation per call on each GPU backend: read off the launches themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from splitkv import DeviceSpec, plan_decode
from splitkv.backends import cuda_launch, triton_launch
from splitkv.backends.triton_prepared import TritonLaunch
from splitkv.bench.fuzz import draw
from splitkv.bench.fuzz.cases import Case, Geometry
from splitkv.bench.fuzz.tensors import Call, Values, make_values
from splitkv.checks import check_inputs

POOL, EACH = 300, 10
MEMBERS = (6, 8, 9, 16, 23, 27, 28, 34, 37, 41, 45, 48, 54)
"""Among them masks whose strides are 1 in some layouts and multiples of 16 in others, crowds, and fp8."""
H200 = DeviceSpec.named("h200")

if triton_launch.INTERPRETED:
    pytest.skip("Triton is interpreted", allow_module_level=True)


def variants(case: Case, values: Values, geometry: Geometry, rows: tuple[int, ...]) -> dict[str, Hashable]:
    """What each backend that takes the call would compile, as on an H200."""
    found: dict[str, Hashable] = {}
    for backend in ("triton", "cuda"):
        try:
            plan = plan_decode(case.problem(geometry), H200, case.policy, backend)
        except ValueError:
            continue
        call = Call(case, values, geometry, rows, plan.workspace_bytes, "cpu")
        given: dict[str, Any] = {n: x for n, x in call.arguments.items() if n not in ("policy", "return_lse")}
        out, workspace = given.pop("out", None), given.pop("workspace", None)
        inputs = check_inputs(
            given.pop("q"), given.pop("k_cache"), given.pop("v_cache"), given.pop("seq_lens"), **given
        )
        shape = (*inputs.q.shape[:-1], case.v_head_dim)
        out = torch.empty(shape, dtype=inputs.q.dtype) if out is None else out
        arguments = inputs.launch_arguments() | dict(
            out=out if out.ndim == 4 else out.unsqueeze(1),
            lse=torch.empty(shape[:-1]) if case.return_lse else None,
            workspace=torch.empty(plan.workspace_bytes, dtype=torch.uint8) if workspace is None else workspace,
            plan=plan,
        )
        if backend == "cuda":
            found[backend] = cuda_launch.prepare(**arguments).variant
        else:
            found[backend] = TritonLaunch(triton_launch.kernel_calls(**arguments), arguments).variant
    return found


@pytest.mark.parametrize("member", MEMBERS)
def test_one_variant_per_call_and_backend(member: int) -> None:
    seen: dict[tuple[str, int], set[Hashable]] = {}
    for i in range(EACH):
        case = draw.draw_case(0, member + POOL * i, POOL)
        if case.shared:  # rows of a stride of 0, which may be a class of its own
            continue
        values = make_values(case)
        calls = [(case.base, tuple(range(case.base.batch)))]
        if case.twin is not None and draw._any_layout(case):
            calls.append((case.twin, case.twin_rows))
        for which, (geometry, rows) in enumerate(calls):
            for backend, variant in variants(case, values, geometry, rows).items():
                seen.setdefault((backend, which), set()).add(variant)
    assert seen and all(len(found) == 1 for found in seen.values()), {key: len(found) for key, found in seen.items()}


def test_a_pool_still_spans_the_arguments() -> None:
    # Member by member: draw remembers the last few.
    cases = [draw.draw_case(0, member + POOL * i, POOL) for member in range(POOL) for i in range(8)]
    features = Counter(feature for case in cases for feature in case.features())
    assert min(features.values()) >= 8 and len(features) >= 40, features
    assert {(case.q_dtype, case.kv_dtype) for case in cases} == draw.DTYPES.keys()
    runs: dict[str, set[int]] = {"triton": set(), "cuda": set()}
    for case in cases:
        for backend in ("triton", "auto"):
            plan = plan_decode(case.problem(case.base), H200, case.policy, backend)
            runs[plan.backend].add(plan.max_run)
    assert runs["triton"] >= {1, 4} and len(runs["cuda"]) >= 2, runs
