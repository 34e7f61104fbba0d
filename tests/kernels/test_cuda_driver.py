"""Launches through the driver's own function: what it is given, on a stand-in for the driver compiled from C."""

from __future__ import annotations

import ctypes
import itertools
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings.driver")
from cuda.bindings import driver
from test_cuda_compile import launch_of

from splitkv import DecodeProblem, DeviceSpec
from splitkv.backends import TENSORS, cuda_driver, cuda_launch

SOURCE = Path(__file__).with_name("fake_driver.c")
H200, A100 = DeviceSpec.named("h200"), DeviceSpec.named("a100")
CLUSTER, PROGRAMMATIC = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION and _PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h
WORKSPACE = TENSORS.index("workspace")


class Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("num_attributes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_int * 4 * 2),
        ("params", ctypes.c_char * 1024),
    ]


class Driver:
    """What was launched on the stand-in since it was made."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.set("params_bytes", cuda_launch.PARAMS.size)
        self.set("status", 0)
        self._seen = self.get("count")

    def get(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, name).value

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._library, name).value = value

    def launched(self) -> list[Launch]:
        ring = (Launch * 8).in_dll(self._library, "launches")
        first, self._seen = self._seen, self.get("count")
        return [Launch.from_buffer_copy(ring[n % 8]) for n in range(first, self._seen)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "libcuda.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE)], check=True)
    return path


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The stand-in in place of the driver, device 0 and stream 0x5000 current, and kernels with handles 1, 2, …"""
    handles = itertools.count(1)
    monkeypatch.setattr(cuda_driver, "DRIVER", str(library))
    monkeypatch.setattr(cuda_launch, "load_kernel", lambda *_: driver.CUfunction(next(handles)))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # a meta tensor's index
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x5000, raising=False)
    cuda_driver.launch_function.cache_clear()
    yield Driver(library)
    cuda_driver.launch_function.cache_clear()


def problem(**changes: Any) -> DecodeProblem:
    return DecodeProblem(**dict(batch=1, num_q_heads=16, num_kv_heads=4, head_dim=256) | changes)


def fields(launch: Launch) -> tuple[Any, ...]:
    params = ctypes.string_at(ctypes.addressof(launch) + Launch.params.offset, cuda_launch.PARAMS.size)
    return cuda_launch.PARAMS.unpack(params)


def attributes(launch: Launch) -> list[list[int]]:
    """Of each attribute its id and the first words of its value."""
    return [list(attribute) for attribute in launch.attributes[: launch.num_attributes]]


def test_layouts_are_those_of_the_bindings(fake: Driver) -> None:
    assert fake.get("config_bytes") == driver.sizeof(driver.CUlaunchConfig)
    assert fake.get("attribute_bytes") == driver.sizeof(driver.CUlaunchAttribute)
    ids = driver.CUlaunchAttributeID
    assert int(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) == PROGRAMMATIC
    assert int(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) == CLUSTER


@pytest.mark.parametrize("batch", [1, 200])
@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
def test_the_driver_is_given_both_kernels(device: DeviceSpec, batch: int, fake: Driver) -> None:
    launch = launch_of(problem(batch=batch), device)
    addresses = [0x1000 * (n + 1) for n in range(len(TENSORS))]
    launch(addresses, 77)
    split, merge = fake.launched()
    plan = launch._plan
    assert tuple(split.grid) == plan.grid and tuple(split.block) == (32 * plan.tile.num_warps, 1, 1)
    assert split.shared_bytes == launch._shared_bytes > 0 and merge.shared_bytes == 0
    assert tuple(merge.grid) == launch._merge_grid and tuple(merge.block)[1:] == (1, 1)
    assert merge.block[0] == 32 * (plan.merge_team if plan.merge_team > 1 else 8)
    assert (split.function, merge.function) == (1, 2)
    dependent = [[PROGRAMMATIC, 1, 0, 0]] if device.capability >= (9, 0) else []
    pairs = [[CLUSTER, 2, 1, 1]] if batch > 1 and device is H200 else []
    assert attributes(split) == dependent + pairs and attributes(merge) == dependent
    for kernel in (split, merge):
        assert kernel.stream == 0x5000
        values = fields(kernel)
        assert list(values[:13]) == addresses and values[13] == addresses[WORKSPACE] + launch._offset
        assert values[36] == 77  # uniform_len, after 14 pointers and 22 strides
        assert values[37:39] == (batch, problem().capacity)


def test_arguments_follow_from_call_to_call(fake: Driver) -> None:
    """The same memory serves every call: nothing of the call before may stay in it."""
    launch = launch_of(problem(), H200)
    for turn in (3, 1, 2):
        launch([turn] * len(TENSORS), turn)
        for kernel in fake.launched():
            values = fields(kernel)
            assert set(values[:13]) == {turn} and values[13] == turn + launch._offset and values[36] == turn


def test_a_problem_that_does_not_split_is_one_launch(fake: Driver) -> None:
    launch = launch_of(problem(capacity=64), H200)
    launch([16] * len(TENSORS), 0)
    assert len(fake.launched()) == 1


def test_each_stream_has_its_configurations_and_few_are_kept(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_of(problem(), H200)
    for stream in (*range(1, 41), 3, 3):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device, stream=stream: stream)
        launch([16] * len(TENSORS), 0)
        assert {kernel.stream for kernel in fake.launched()} == {stream}
        assert len(launch._free) <= cuda_launch.STREAMS


def test_another_device_is_made_current(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: made.append(device) or nullcontext())
    launch_of(problem(), H200)([16] * len(TENSORS), 0)
    assert made == [None] and len(fake.launched()) == 2


def test_a_refused_launch_names_the_status(fake: Driver) -> None:
    launch = launch_of(problem(), H200)
    for status, name in ((701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"), (123_456, "status 123456")):
        fake.set("status", status)
        with pytest.raises(RuntimeError, match=f"CUDA: {name}"):
            launch([16] * len(TENSORS), 0)
        assert len(fake.launched()) == 1  # the merge is not launched after it
    fake.set("status", 0)
    launch([16] * len(TENSORS), 0)
    assert len(fake.launched()) == 2


def test_a_thread_without_a_context_takes_the_devices(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    def take(device: Any) -> None:
        taken.append(device)
        fake.set("status", 0)

    launch = launch_of(problem(), H200)
    monkeypatch.setattr(cuda_driver, "take_context", take)
    fake.set("status", 201)
    launch([16] * len(TENSORS), 0)
    assert taken == [None]
    assert [kernel.function for kernel in fake.launched()] == [1, 1, 2]
    fake.set("status", 201)
    monkeypatch.setattr(cuda_driver, "take_context", taken.append)
    with pytest.raises(RuntimeError, match="CUDA: CUDA_ERROR_INVALID_CONTEXT"):
        launch([16] * len(TENSORS), 0)


def test_the_context_taken_is_the_primary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    success, current = driver.CUresult(0), [driver.CUcontext(0)]
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (success, current[-1]))
    monkeypatch.setattr(driver, "cuDeviceGet", lambda ordinal: (success, 10 + ordinal))
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", lambda device: (success, driver.CUcontext(100 + device)))
    monkeypatch.setattr(driver, "cuCtxSetCurrent", lambda context: (current.append(context), (success,))[1])
    cuda_driver.take_context(3)
    assert [int(context) for context in current] == [0, 113]
    cuda_driver.take_context(4)  # there is one: it stays
    assert [int(context) for context in current] == [0, 113]


def test_threads_never_share_the_memory_of_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread is in the driver, another launches the same call on the same stream: each keeps its values."""
    inside, go_on, seen = threading.Event(), threading.Event(), []
    monkeypatch.setattr(cuda_launch, "load_kernel", lambda *_: driver.CUfunction(1))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)

    def slow_launch(config: Any, function: Any, arguments: ctypes.c_void_p, extra: None) -> int:
        (params,) = struct.unpack("=q", ctypes.string_at(arguments, 8))
        if threading.current_thread() is not threading.main_thread() and not inside.is_set():
            inside.set()
            assert go_on.wait(10)
        (q,) = struct.unpack("=q", ctypes.string_at(params, 8))
        seen.append((threading.current_thread() is threading.main_thread(), q))
        return 0

    monkeypatch.setattr(cuda_driver, "launch_function", lambda: slow_launch)
    launch = launch_of(problem(), H200)
    other = threading.Thread(target=launch, args=([32] * len(TENSORS), 0))
    other.start()
    assert inside.wait(10)
    launch([16] * len(TENSORS), 0)
    go_on.set()
    other.join()
    assert seen == [(True, 16), (True, 16), (False, 32), (False, 32)]
    assert len(launch._free[0]) == 2  # both wait for the next call
