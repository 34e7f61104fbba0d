"""Prepared launches of the Triton kernels, without a GPU: what they hand over is what Triton's own launch would.

Triton's own binder says what it specialises a call on, for a GPU that is not here. Kernels are replaced by recorders
where they would be launched.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from splitkv import DeviceSpec, plan_decode  # noqa: E402
from splitkv.backends import TENSORS, rowwise, triton_launch, triton_prepared  # noqa: E402
from splitkv.backends.triton_prepared import KernelCall, TritonLaunch, direct_launch  # noqa: E402
from splitkv.checks import check_inputs  # noqa: E402

if triton_launch.INTERPRETED:
    pytest.skip("the interpreter prepares nothing", allow_module_level=True)

BATCH, CAPACITY, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 2, 512, 4, 2, 32, 16


def ints(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int32)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one length": {"seq_lens": 40},
    "paged": {"block_table": ints(BATCH, CAPACITY // PAGE)},
    "sinks": {"sinks": torch.zeros(Q_HEADS)},
    "starts": {"starts": ints(BATCH)},
    "bool mask": {"mask": torch.ones(CAPACITY, dtype=torch.bool)},
    "additive mask": {"mask": torch.ones(BATCH, 1, 1, CAPACITY)},
    "mask of every third": {"mask": torch.ones(BATCH, 1, 1, 3 * CAPACITY)[..., ::3]},
    "k scale": {"k_scale": torch.ones(KV_HEADS)},
    "v scale": {"v_scale": torch.ones(())},
    "numbers": {"k_scale": 0.5, "v_scale": 3.0, "softmax_scale": 0.25},
    "softcap": {"softcap": 5.0},
    "no lse": {"lse": False},
    "one split": {"policy": "off"},
    "other rows": {"batch": 5, "policy": "waves"},
    "misaligned q": {"shift": 1},
    "long lengths": {"seq_lens": torch.ones(BATCH, dtype=torch.int64)},
}


def arguments(
    *,
    policy: str = "auto",
    lse: bool = True,
    batch: int = BATCH,
    shift: int = 0,
    seq_lens: Tensor | int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What `launch` and `prepare` take, on fresh tensors."""
    q = torch.zeros(batch * Q_HEADS * HEAD_DIM + shift, dtype=torch.bfloat16)[shift:].view(batch, Q_HEADS, HEAD_DIM)
    outer = (64, PAGE) if "block_table" in options else (batch, CAPACITY)
    k, v = (torch.zeros(*outer, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
    inputs = check_inputs(q, k, v, ints(batch) if seq_lens is None else seq_lens, **options)
    plan = plan_decode(inputs.problem, DeviceSpec.named("h200"), policy)
    workspace = torch.zeros(plan.workspace_bytes, dtype=torch.uint8) if plan.splits else None
    out, sums = torch.zeros_like(inputs.q), torch.zeros(inputs.q.shape[:-1]) if lse else None
    return inputs.launch_arguments() | dict(out=out, lse=sums, workspace=workspace, plan=plan)


def addresses(made: dict[str, Any]) -> list[int]:
    return [made[name].data_ptr() if isinstance(made[name], Tensor) else 0 for name in TENSORS]


class Compiled:
    """A compiled kernel of Triton 3.6, whose C launcher records."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches: list[tuple[Any, ...]], **launcher: Any) -> None:
        self.run = SimpleNamespace(
            launch=lambda *values: launches.append(values),
            launch_cooperative_grid=False,
            launch_pdl=True,
            global_scratch_size=0,
            profile_scratch_size=0,
            **launcher,
        )


class Kernel:
    """A kernel that records its public launches, and returns a compiled kernel that records the direct ones."""

    def __init__(self, kernel: Any) -> None:
        self.fn, self.arg_names, self.params = kernel.fn, kernel.arg_names, kernel.params
        self.public: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**named: Any) -> Compiled:
            self.public.append((grid, named))
            return Compiled(self.direct)

        return launch


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One CUDA device as far as a launch can see, Triton 3.6, and no profiler."""
    state = SimpleNamespace(device=0, entered=[])
    active = SimpleNamespace(
        get_current_stream=lambda device: 1000 + device,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=SimpleNamespace(calls=[]))
    monkeypatch.setattr(triton_prepared, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(triton_prepared, "knobs", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(triton_prepared, "triton_version", lambda: (3, 6))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.device)
    state.runtime = runtime
    return state


def prepared(calls: list[KernelCall], made: dict[str, Any], device: int = 0) -> tuple[TritonLaunch, list[Kernel]]:
    """A prepared launch of recording kernels, on a CUDA device as far as it knows."""
    recorders = [Kernel(call.kernel) for call in calls]
    calls = [replace(call, kernel=recorder) for call, recorder in zip(calls, recorders, strict=True)]
    launch = TritonLaunch(calls, made)
    launch._device = device
    return launch, recorders


def backend_calls(backend: str, made: dict[str, Any]) -> list[KernelCall]:
    return triton_launch.kernel_calls(**made) if backend == "triton" else [rowwise.kernel_call(**made)]


@pytest.mark.parametrize("backend", ["triton", "rowwise"])
@pytest.mark.parametrize("options", OPTIONS)
def test_it_hands_over_what_the_public_launch_would(options: str, backend: str, here: SimpleNamespace) -> None:
    """First through Triton, then directly, each time at the addresses of other tensors and with another length."""
    made = arguments(**OPTIONS[options])
    launch, recorders = prepared(backend_calls(backend, made), made)
    for turn in range(3):
        other = arguments(**OPTIONS[options])
        length = 0 if isinstance(other["seq_lens"], Tensor) else 41 + turn
        if length:
            other["seq_lens"] = length
        launch(addresses(other), length)
        for call, recorder in zip(backend_calls(backend, other), recorders, strict=True):
            q, out = other["q"], other["out"]
            absent = {n for n, v in call.arguments.items() if (v is q and n != "q") or (v is out and n == "lse")}
            want = {n: v.data_ptr() if isinstance(v, Tensor) else v for n, v in call.arguments.items()}
            if turn == 0:
                grid, named = recorder.public.pop()
                assert grid == call.grid
                assert {name: named.pop(name) for name in call.options} == call.options
                pointers = {name: value for name, value in named.items() if isinstance(value, triton_prepared.Pointer)}
                assert {n: p.dtype for n, p in pointers.items()} == {
                    n: v.dtype for n, v in call.arguments.items() if isinstance(v, Tensor)
                }
                got = named | {name: pointer.data_ptr() for name, pointer in pointers.items()}
            else:
                head = (*call.grid, 1000, "function", False, True, None, None, "metadata", None, None, None)
                values = recorder.direct.pop()
                assert values[: len(head)] == head
                got = dict(zip(recorder.arg_names, values[len(head) :], strict=True))
            assert not recorder.public and not recorder.direct
            assert {n: v for n, v in got.items() if n not in absent} == {
                n: v for n, v in want.items() if n not in absent
            }


def specialisation(call: KernelCall, named: dict[str, Any]) -> Any:
    """What Triton compiles for, by its own binder."""
    bind = create_function_from_signature(
        call.kernel.signature, call.kernel.params, CUDABackend(GPUTarget("cuda", 90, 32))
    )
    _, found, options = bind(**named, **call.options, debug=False, instrumentation_mode="")
    return found, sorted(options.items())


def stood_in(launch: TritonLaunch, call: KernelCall, recorder: Kernel, made: dict[str, Any], length: int) -> Any:
    """The specialisation of a prepared launch's first call, at these tensors and this length."""
    launch._kernels = [kernel for kernel in launch._kernels if kernel._kernel is recorder]
    launch(addresses(made), length)
    return specialisation(call, {n: v for n, v in recorder.public.pop()[1].items() if n not in call.options})


def test_what_may_change_between_launches_changes_no_specialisation(here: SimpleNamespace) -> None:
    """Addresses that keep their alignment, and any length, 0, 1 and multiples of 16 among them."""
    for name, options in OPTIONS.items():
        made = arguments(**options)
        for index, call in enumerate(backend_calls("triton", made)):
            found = []
            for length in (0, 1, 16, 41, 2**31 - 1):
                launch, recorders = prepared(backend_calls("triton", made), made)
                other = arguments(**options)
                found.append(stood_in(launch, call, recorders[index], other, length))
            assert all(each == found[0] for each in found), name
            if "misaligned" not in name and made["lse"] is not None:  # there absent tensors stand elsewhere
                assert found[0] == specialisation(call, call.arguments), name


def test_a_variant_is_what_triton_compiles_for(here: SimpleNamespace) -> None:
    """Two launches have one variant where Triton would use one compiled kernel, and only there."""
    strides = {f"{size} rows": {"batch": size, "policy": "waves"} for size in (1, 2, 3, 16)}
    options = OPTIONS | strides | {"the same": {}, "one longer length": {"seq_lens": 48}}
    found = {}
    for name, each in options.items():
        made = arguments(**each)
        calls = backend_calls("triton", made)
        found[name] = TritonLaunch(calls, made).variant, [specialisation(call, call.arguments) for call in calls]
    for name, (variant, compiled) in found.items():
        for other, (other_variant, other_compiled) in found.items():
            assert (variant == other_variant) == (compiled == other_compiled), (name, other)
    assert found["plain"] == found["the same"] and found["one length"] == found["one longer length"]
    assert found["2 rows"] == found["3 rows"], "the schedule's integers make no other kernel"
    assert found["plain"][0] != found["sinks"][0]
    made = arguments()
    fewer_registers = [replace(call, options=call.options | {"maxnreg": 64}) for call in backend_calls("triton", made)]
    assert TritonLaunch(fewer_registers, made).variant != found["plain"][0]


def test_another_device_is_made_current(here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, index: int) -> None:
            self.index, self.before = index, here.device

        def __enter__(self) -> None:
            here.device = self.index

        def __exit__(self, *_: object) -> None:
            here.device = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    made = arguments()
    launch, _ = prepared(backend_calls("triton", made), made, device=1)
    seen: list[tuple[int, int]] = []
    for kernel in launch._kernels:
        kernel._direct = lambda stream, values: seen.append((here.device, stream))
    launch(addresses(made), 0)
    assert seen == [(1, 1001), (1, 1001)] and here.device == 0


def test_a_profiler_is_told_by_triton(here: SimpleNamespace) -> None:
    made = arguments()
    launch, recorders = prepared(backend_calls("triton", made), made)
    launch(addresses(made), 0)
    here.runtime.launch_exit_hook.calls.append(print)
    launch(addresses(made), 0)
    assert [(len(r.public), len(r.direct)) for r in recorders] == [(2, 0), (2, 0)]
    here.runtime.launch_exit_hook.calls.clear()
    launch(addresses(made), 0)
    assert [(len(r.public), len(r.direct)) for r in recorders] == [(2, 1), (2, 1)]


def test_launchers_of_later_tritons(here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    compiled = Compiled(launches, arg_annotations="annotations", kernel_signature=b"signature")
    for version in ((3, 7), (3, 9)):
        monkeypatch.setattr(triton_prepared, "triton_version", lambda version=version: version)
        direct = direct_launch(compiled, (5, 6, 7))
        assert direct is not None
        direct(9, (1, 2, 3))
        assert launches.pop() == (
            5, 6, 7, 9, "function", False, True, "metadata", None, None, None, None, None, "annotations", b"signature",
            (1, 2, 3),
        )  # fmt: skip
    for version in ((3, 5), (3, 10), (4, 0)):
        monkeypatch.setattr(triton_prepared, "triton_version", lambda version=version: version)
        assert direct_launch(compiled, (1, 1, 1)) is None


@pytest.mark.parametrize("need", ["global_scratch_size", "profile_scratch_size", "gsan_enabled"])
def test_a_kernel_that_wants_more_is_left_to_triton(need: str, here: SimpleNamespace) -> None:
    compiled = Compiled([])
    assert direct_launch(compiled, (1, 1, 1)) is not None
    setattr(compiled.run, need, 1)
    assert direct_launch(compiled, (1, 1, 1)) is None


def test_a_launch_that_a_hook_took_is_left_to_triton(here: SimpleNamespace) -> None:
    assert direct_launch(None, (1, 1, 1)) is None


def test_a_kernel_with_a_tensor_among_its_numbers_is_refused(here: SimpleNamespace) -> None:
    made = arguments()
    call = backend_calls("triton", made)[0]
    with pytest.raises(TypeError, match="split_kernel: expected its tensors before its other parameters"):
        TritonLaunch([replace(call, arguments=call.arguments | {"batch": torch.zeros(1)})], made)


def test_another_vendors_launcher_is_left_to_triton(here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_prepared.driver.active, "get_current_target", lambda: GPUTarget("hip", "gfx942", 64))
    assert direct_launch(Compiled([]), (1, 1, 1)) is None


def test_this_tritons_version_is_read() -> None:
    assert triton.__version__.startswith("{}.{}.".format(*triton_prepared.triton_version()))
