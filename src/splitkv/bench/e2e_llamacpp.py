"""llama.cpp beside ours: single-token decode of a GGUF file at several depths, and its logits.

llama.cpp runs in a process of its own (llamacpp_worker.py) through llama-cpp-python, an optional package. What it
cannot do (not installed, built without CUDA, out of memory, no such cache type) becomes an entry of `not_measured`
with the reason; the run goes on.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .contender import installed
from .llamacpp_worker import KV_TYPES, WARM_UP_STEPS
from .machine import usable_cores
from .progress import Progress
from .timing import summarise

NAME = "llama.cpp"
PACKAGE = "llama-cpp-python"
METHOD = (
    "random tokens prefilled to each depth in one context, then single-token decodes through llama-cpp-python's "
    f"bindings, each followed by a synchronise; {WARM_UP_STEPS} untimed steps before; median, p20 and p80; logits are "
    "computed, no token is chosen; flash attention on, except with f32 KV, which it would round to f16"
)
ABSENT = f"{PACKAGE} is not installed"
_REASON_LENGTH = 400


@dataclass(frozen=True)
class LlamaCppOptions:
    """What to run. depths: tokens held at the first timed step. kv_dtypes: f32, f16, bf16 or q8_0; others are reported
    as not measured. steps: timed at each depth. threads: on the CPU, default all. gpu_layers: 0 or -1, all.
    deadline: no chunk is begun when time.monotonic() is past it."""

    depths: tuple[int, ...]
    kv_dtypes: tuple[str, ...] = ("f16",)
    steps: int = 32
    threads: int | None = None
    gpu_layers: int = 0
    seed: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        if not self.depths or min(self.depths) <= WARM_UP_STEPS:
            raise ValueError(f"depths: expected numbers above {WARM_UP_STEPS}, got {self.depths}")
        apart = self.steps + WARM_UP_STEPS
        if any(later - depth <= apart for depth, later in pairwise(sorted(self.depths))):
            raise ValueError(f"depths: expected numbers more than {apart} apart, got {self.depths}")
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, got {self.steps}")


@dataclass(frozen=True)
class Tokens:
    """A prompt, and tokens that are decoded one at a time after it."""

    prompt: tuple[int, ...]
    follow: tuple[int, ...] = ()
    kv_dtype: str = "f32"


def time_llamacpp(
    gguf: Path,
    options: LlamaCppOptions,
    progress: Progress = lambda done, total, text: None,
    compare: Tokens | None = None,
) -> dict[str, Any]:
    """Milliseconds of a decode step of llama.cpp on the file's model, at each depth and KV type.

    progress: called with tokens prefilled, of all, and a text. Returns {"version", "system", "method", "rows",
    "not_measured"}: a row has contender, kv_dtype, depth, ms_per_token, ms_p20, ms_p80, steps, prefill_tokens_s; an
    entry of not_measured has contender, kv_dtype, depth and reason. With `compare` also "logits", as of
    llamacpp_logits, or the reason why there are none. Raises ValueError where the file is not there.
    """
    result: dict[str, Any] = {"version": None, "system": None, "method": METHOD, "rows": [], "not_measured": []}
    logits = _Logits(compare)
    known = [kv_dtype for kv_dtype in options.kv_dtypes if kv_dtype in KV_TYPES]
    wanted = {(kv_dtype, depth): "" for kv_dtype in options.kv_dtypes for depth in options.depths}
    for kv_dtype, depth in wanted:
        if kv_dtype not in KV_TYPES:
            wanted[kv_dtype, depth] = f"llama.cpp has no {kv_dtype} cache"
    job = {
        "compare": logits.job, "depths": options.depths, "kv_dtypes": known, "steps": options.steps,
        "seed": options.seed, "deadline": options.deadline,
    }  # fmt: skip
    reason = "it ended early"
    for event in _run(gguf, job, options.threads, options.gpu_layers) if known or compare else ():
        logits.take(event)
        match event["event"]:
            case "about":
                result |= {"version": event["version"], "system": event["system"]}
            case "progress":
                progress(event["done"], event["total"], f"{NAME} {event['kv_dtype']}")
            case "row":
                wanted.pop((event["kv_dtype"], event["depth"]))
                result["rows"].append(_row(event))
            case "refused":
                wanted[event["kv_dtype"], event["depth"]] = event["reason"]
            case "failed":
                reason = event["reason"]
    for (kv_dtype, depth), refusal in wanted.items():
        entry = {"contender": NAME, "kv_dtype": kv_dtype, "depth": depth, "reason": refusal or reason}
        result["not_measured"].append(entry)
    return result if compare is None else result | {"logits": logits.found()}


def _row(event: dict[str, Any]) -> dict[str, Any]:
    times = summarise([ms * 1e3 for ms in event["ms"]])
    return {
        "contender": NAME, "kv_dtype": event["kv_dtype"], "depth": event["depth"],
        "ms_per_token": times.median_us / 1e3, "ms_p20": times.p20_us / 1e3, "ms_p80": times.p80_us / 1e3,
        "steps": times.samples, "prefill_tokens_s": event["prefilled"] / event["prefill_s"],
    }  # fmt: skip


class _Logits:
    """Those that the worker sends, row by row."""

    def __init__(self, tokens: Tokens | None) -> None:
        self.job = None if tokens is None else asdict(tokens)
        self._wanted = 0 if tokens is None else len(tokens.follow) + 1
        self._rows: list[Tensor] = []
        self._reason = "it ended early"

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "logits":
            data = bytearray(base64.b64decode(event["f32"]))
            self._rows.append(torch.frombuffer(data, dtype=torch.float32))
        elif event["event"] in ("no logits", "failed"):
            self._reason = event["reason"]

    def found(self) -> Tensor | str:
        """All of them, or why not."""
        return torch.stack(self._rows) if len(self._rows) == self._wanted else self._reason


def llamacpp_logits(gguf: Path, tokens: Tokens, gpu_layers: int = 0, threads: int | None = None) -> Tensor:
    """llama.cpp's logits after the prompt and after each token that follows, [len(follow) + 1, vocab_size] f32.

    RuntimeError with llama.cpp's reason, or where it is not installed. ValueError where the file is not there.
    """
    logits = _Logits(tokens)
    for event in _run(gguf, {"compare": logits.job, "kv_dtypes": []}, threads, gpu_layers):
        logits.take(event)
    found = logits.found()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _run(gguf: Path, job: dict[str, Any], threads: int | None, gpu_layers: int) -> Iterator[dict[str, Any]]:
    """The worker's events; a process that dies is one more, "failed", with the last it said."""
    if not installed("llama_cpp"):
        yield {"event": "failed", "reason": ABSENT}
        return
    if not gguf.is_file():
        raise ValueError(f"gguf: expected a GGUF file, and {gguf} is not there")
    job |= {"gguf": str(gguf), "threads": threads or usable_cores(), "gpu_layers": gpu_layers}
    command = [sys.executable, "-m", "splitkv.bench.llamacpp_worker"]
    with tempfile.TemporaryFile("w+") as question, tempfile.TemporaryFile("w+") as said:
        json.dump(job, question)
        question.seek(0)
        with subprocess.Popen(command, stdin=question, stdout=subprocess.PIPE, stderr=said, text=True) as process:
            try:
                yield from map(json.loads, process.stdout or ())
            except BaseException:  # such as Ctrl-C, or a caller that stops listening
                process.kill()
                raise
        if process.returncode:
            said.seek(0)
            last = " ".join(said.read().split())[-_REASON_LENGTH:]
            yield {"event": "failed", "reason": f"llama.cpp's process ended with {process.returncode}: {last}"}
