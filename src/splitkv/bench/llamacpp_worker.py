"""llama.cpp in a process of its own: it ends the process on errors that it does not expect, such as memory that runs
out in the middle. e2e_llamacpp.py starts it (`python -m splitkv.bench.llamacpp_worker`), gives it a job, a JSON
object, on standard input, and reads one JSON object a line from its standard output.

Of llama-cpp-python only the bindings of llama.h are used. Importing splitkv has loaded torch, and with it the CUDA
libraries that a CUDA build of llama.cpp asks for, so it finds them wherever torch keeps them.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
"""GGML's numbers of the types of keys and values. llama.cpp's flash attention would round f32 ones to f16, so with
them it is off."""
WARM_UP_STEPS = 4
"""Untimed steps that lead up to a depth. On a GPU llama.cpp captures its graph in the first ones."""
TIME_IS_UP = "the time of the run was up"
_REPORT_S = 1.0
_WARNING = 3
"""Of ggml's log levels: this and 4, an error."""

Emit = Callable[[dict[str, Any]], None]


class Refused(RuntimeError):
    """llama.cpp said no; the text says to what, and what it logged."""


class Engine:
    """A model in llama.cpp. gpu_layers: 0 for the CPU alone, -1 for all on the GPU."""

    def __init__(self, gguf: str, threads: int, gpu_layers: int) -> None:
        llama_cpp: Any = import_module("llama_cpp")
        self.lib, self.threads, self.chunk = llama_cpp, threads, 2048 if gpu_layers else 512
        self._log: deque[str] = deque(maxlen=4)
        self._keep_log = llama_cpp.llama_log_callback(self._logged)
        llama_cpp.llama_log_set(self._keep_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        if gpu_layers and not llama_cpp.llama_supports_gpu_offload():
            raise Refused("llama.cpp sees no GPU: built without CUDA, or none is here")
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = gpu_layers
        self.model = llama_cpp.llama_model_load_from_file(gguf.encode(), options)
        if not self.model:
            raise Refused(f"llama.cpp does not load {gguf}: {self.said()}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def _logged(self, level: int, text: bytes, _: Any) -> None:
        if level in (_WARNING, _WARNING + 1):
            self._log.append(text.decode(errors="replace").strip())

    def said(self) -> str:
        """The last warnings and errors, and none of them twice."""
        text = "; ".join(filter(None, self._log))
        self._log.clear()
        return text or "it gave no reason"

    def about(self) -> dict[str, str]:
        """What is running: the bindings' version and llama.cpp's own line on its build and processor."""
        system = self.lib.llama_print_system_info()
        return {"version": self.lib.__version__, "system": system.decode(errors="replace").strip()}

    @contextmanager
    def context(self, kv_dtype: str, capacity: int) -> Iterator[Any]:
        """A cache of `capacity` tokens and the rest of what a sequence needs."""
        options = self.lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = capacity, self.chunk, self.chunk
        options.n_threads = options.n_threads_batch = self.threads
        options.type_k = options.type_v = KV_TYPES[kv_dtype]
        flash = kv_dtype != "f32"
        options.flash_attn_type = (
            self.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        context = self.lib.llama_init_from_model(self.model, options)
        if not context:
            raise Refused(f"llama.cpp makes no context of {capacity} tokens with {kv_dtype} KV: {self.said()}")
        try:
            yield context
        finally:
            self.lib.llama_free(context)

    def decode(self, context: Any, tokens: Sequence[int]) -> None:
        """Run tokens behind those that the context holds, and wait."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        code = self.lib.llama_decode(context, self.lib.llama_batch_get_one(array, len(tokens)))
        if code:
            raise Refused(f"llama_decode returned {code}: {self.said()}")
        self.lib.llama_synchronize(context)

    def prefill(self, context: Any, tokens: Sequence[int], report: Callable[[int], None] = lambda done: None) -> None:
        """Run tokens in chunks; report is called with the number done."""
        for start in range(0, len(tokens), self.chunk):
            self.decode(context, tokens[start : start + self.chunk])
            report(min(start + self.chunk, len(tokens)))

    def logits(self, context: Any) -> bytes:
        """Of the last token, [vocab_size] f32, as bytes."""
        return ctypes.string_at(self.lib.llama_get_logits_ith(context, -1), 4 * self.vocab_size)


def time_depths(engine: Engine, job: dict[str, Any], emit: Emit) -> None:
    """For each KV type one context, filled to each depth in turn; `steps` single tokens are timed at each."""
    for kv_dtype in job["kv_dtypes"]:
        left = sorted(job["depths"])
        try:
            for row in _rows(engine, job, kv_dtype, emit):
                emit({"event": "row", "kv_dtype": kv_dtype, **row})
                left.remove(row["depth"])
        except Refused as refusal:
            for depth in left:
                emit({"event": "refused", "kv_dtype": kv_dtype, "depth": depth, "reason": str(refusal)})


def _rows(engine: Engine, job: dict[str, Any], kv_dtype: str, emit: Emit) -> Iterator[dict[str, Any]]:
    """Depth, milliseconds of each step there, and the prefill that led to it. Refused past the deadline, a time of the
    clock that all processes share."""
    draw, depths, steps = random.Random(job["seed"]), sorted(job["depths"]), job["steps"]
    held, reported = 0, time.monotonic()

    def tokens(count: int) -> list[int]:
        return [draw.randrange(engine.vocab_size) for _ in range(count)]

    def report(done: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if job["deadline"] is not None and now > job["deadline"]:
            raise Refused(TIME_IS_UP)
        if now - reported > _REPORT_S:
            reported = now
            emit({"event": "progress", "kv_dtype": kv_dtype, "done": held + done, "total": depths[-1]})

    with engine.context(kv_dtype, depths[-1] + steps) as context:
        for depth in depths:
            prompt = tokens(depth - WARM_UP_STEPS - held)
            start = time.perf_counter()
            engine.prefill(context, prompt, report)
            prefill_s = time.perf_counter() - start
            times = []
            for token in tokens(WARM_UP_STEPS + steps):
                start = time.perf_counter()
                engine.decode(context, [token])
                times.append((time.perf_counter() - start) * 1e3)
            held = depth + steps
            yield {
                "depth": depth, "ms": times[WARM_UP_STEPS:], "prefilled": len(prompt), "prefill_s": prefill_s,
            }  # fmt: skip


def give_logits(engine: Engine, prompt: list[int], follow: list[int], kv_dtype: str, emit: Emit) -> None:
    """Logits after the prompt and after each of the tokens that follow."""
    try:
        with engine.context(kv_dtype, len(prompt) + len(follow)) as context:
            engine.prefill(context, prompt)
            for token in [None, *follow]:
                if token is not None:
                    engine.decode(context, [token])
                emit({"event": "logits", "f32": base64.b64encode(engine.logits(context)).decode()})
    except Refused as refusal:
        emit({"event": "no logits", "reason": str(refusal)})


def main() -> None:
    """Run the job that standard input holds."""
    job = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # whatever the library prints must not come between the objects

        def emit(event: dict[str, Any]) -> None:
            out.write(json.dumps(event) + "\n")
            out.flush()

        try:
            engine = Engine(job["gguf"], job["threads"], job["gpu_layers"])
            emit({"event": "about", **engine.about()})
            if job["compare"] is not None:
                give_logits(engine, **job["compare"], emit=emit)
            time_depths(engine, job, emit)
        except Refused as refusal:
            emit({"event": "failed", "reason": str(refusal)})


if __name__ == "__main__":
    main()
