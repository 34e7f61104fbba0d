"""Host time of an eager call, of a first call, and of the import, on the current CUDA device.

    python tools/host_overhead.py [--json]

One row of 16/4 heads of 256, 4096 keys, bf16. Calls are timed in groups of 50 without waiting for the GPU; the queue is
emptied between groups, or a full one would be timed. First calls run in processes of their own, with an empty and with
a filled compile cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitkv.backends.cuda_launch import CudaLaunch

CALLS, GROUP = 2000, 50
FIRST_CALL = """
import time
import numpy, torch
q = torch.randn(1, 16, 256, device="cuda").to(torch.bfloat16)
k, v = (torch.randn(1, 4096, 4, 256, device="cuda").to(torch.bfloat16) for _ in range(2))
lens = torch.tensor([4096], dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
import splitkv
imported = time.perf_counter()
splitkv.decode_attention(q, k, v, lens)
torch.cuda.synchronize()
print(imported - start, time.perf_counter() - imported)
"""


def measure() -> dict[str, float]:
    """Microseconds of host time by name."""
    import torch

    from splitkv import DecodeAttention, DecodeProblem, decode_attention, plan_decode
    from splitkv.backends import TENSORS, launcher, preparer
    from splitkv.backends.cuda_launch import CudaLaunch
    from splitkv.checks import check_inputs
    from splitkv.prepared import CallMemo, call_key, environment
    from splitkv.scratch import Scratch

    q = torch.randn(1, 16, 256, device="cuda").to(torch.bfloat16)
    k, v = (torch.randn(1, 4096, 4, 256, device="cuda").to(torch.bfloat16) for _ in range(2))
    lens = torch.tensor([4096], dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    attention = DecodeAttention(DecodeProblem(1, 16, 4, 256, capacity=4096))
    inputs = check_inputs(q, k, v, lens)
    tensors: dict[str, Any] = inputs.launch_arguments()
    tensors |= dict(out=out.unsqueeze(1), lse=None, workspace=attention.workspace, plan=attention.plan)
    addresses = [t.data_ptr() if isinstance(t, torch.Tensor) else 0 for t in (tensors[name] for name in TENSORS)]
    backend = attention.plan.backend
    launch, prepared = launcher(backend), preparer(backend)(**tensors)
    on_triton = tensors | dict(plan=plan_decode(attention.problem, attention.plan.device, backend="triton"))
    triton = preparer("triton")(**on_triton)
    if prepared is None or triton is None:
        raise SystemExit("backend triton prepares nothing here: unset TRITON_INTERPRET")
    prepared(addresses, 0)
    step = iter(range(10**9))
    kept, scratch = CallMemo(), Scratch()

    def key() -> Any:
        found = call_key(q, k, v, lens, None, None, ("auto", "auto", False))
        return kept.find(found[0], 0)

    def workspace() -> None:
        tensor, waiting = scratch.take(q, 0, attention.workspace_bytes)
        if waiting is not None:
            waiting.append(tensor)

    calls: dict[str, Callable[[], Any]] = {
        "decode_attention": lambda: decode_attention(q, k, v, lens),
        "decode_attention, out=": lambda: decode_attention(q, k, v, lens, out=out),
        "decode_attention, a growing int": lambda: decode_attention(q, k, v, next(step) % 4096 + 1),
        "DecodeAttention.run": lambda: attention.run(q, k, v, lens),
        "DecodeAttention.run, out=": lambda: attention.run(q, k, v, lens, out=out),
        "of it: key and look-up": key,
        "of it: environment": environment,
        "of it: out": lambda: torch.empty_like(q),
        "of it: workspace": workspace,
        f"of it: prepared launch of both kernels ({backend})": lambda: prepared(addresses, 0),
        "of it: current device, stream, capture": lambda: (
            torch.cuda.current_device(),
            torch._C._cuda_getCurrentRawStream(0),
            torch.cuda.is_current_stream_capturing(),
        ),
        "checks and argument views alone, in full": lambda: check_inputs(q, k, v, lens),
        f"a launch that is not prepared ({backend})": lambda: launch(**tensors),
        "prepared launch of both kernels (triton)": lambda: triton(addresses, 0),
        "a torch kernel, for scale (out.zero_)": lambda: out.zero_(),
    }
    if isinstance(prepared, CudaLaunch):
        calls["of that: the driver's two launches"] = driver_calls(prepared)
    return {name: median_us(call, torch.cuda.synchronize) for name, call in calls.items()}


def driver_calls(prepared: CudaLaunch) -> Callable[[], Any]:
    """What a prepared launch asks of the driver, and nothing else."""
    from splitkv.backends.cuda_driver import launch_function

    (free,) = prepared._free.values()
    launch, kernels, arguments = launch_function(), free[-1]._kernels, free[-1]._arguments

    def call() -> None:
        for config, function in kernels:
            launch(config, function, arguments, None)

    return call


def median_us(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    times = []
    for _ in range(GROUP):
        call()
    for _ in range(CALLS // GROUP):
        wait()
        start = time.perf_counter_ns()
        for _ in range(GROUP):
            call()
        times.append((time.perf_counter_ns() - start) / GROUP)
    wait()
    return statistics.median(times) / 1e3


def first_calls() -> dict[str, float]:
    """Seconds of `import splitkv` beyond torch and numpy, and of the first call, by the state of the compile cache."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRITON_CACHE_DIR": folder, "XDG_CACHE_HOME": folder}
        for cache in ("cold", "warm"):
            text = subprocess.run(
                [sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True, check=True
            ).stdout
            imported, called = map(float, text.split())
            seconds["import splitkv, beyond torch"] = imported
            seconds[f"first call, {cache} compile cache"] = called
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("host_overhead: expected a CUDA device, found none")
    gpu, host_us, first_s = torch.cuda.get_device_name(), measure(), first_calls()
    if as_json:
        print(json.dumps({"gpu": gpu, "host_us": host_us, "first_s": first_s}))
        return
    print(gpu)
    for name, us in host_us.items():
        print(f"{us:9.1f} us  {name}")
    for name, seconds in first_s.items():
        print(f"{seconds:9.2f} s   {name}")


if __name__ == "__main__":
    main()
