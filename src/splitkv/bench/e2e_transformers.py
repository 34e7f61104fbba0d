"""transformers beside ours: its model of a GGUF file, stock eager attention and its growing cache, batch 1."""

from __future__ import annotations

import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from .contender import installed
from .failures import require_working_device, short_reason
from .llamacpp_worker import TIME_IS_UP
from .timing import summarise

NAME = "transformers"
METHOD = (
    "AutoModelForCausalLM of the same GGUF file, attn_implementation eager, DynamicCache; a prompt prefilled, random "
    "keys and values behind it up to each depth; single-token steps timed, each with a synchronise; median, p20, p80"
)
ABSENT = "transformers and accelerate are not both installed"
WARM_UP_STEPS = 1
_CHUNK = 512


@torch.no_grad()
def time_transformers(
    gguf: Path,
    dtype: torch.dtype,
    device: str,
    depths: tuple[int, ...],
    steps: int,
    prefill: int,
    seed: int = 0,
    deadline: float | None = None,
) -> dict[str, Any]:
    """Milliseconds of a decode step at each depth, in {"version", "method", "rows", "not_measured"}; rows and entries
    as e2e_llamacpp.time_llamacpp's. prefill: longest prompt that is really run."""
    result: dict[str, Any] = {"version": None, "method": METHOD, "rows": [], "not_measured": []}
    left = sorted(depths)
    reason = ABSENT
    if installed("transformers") and installed("accelerate"):
        try:
            import transformers

            result["version"] = transformers.__version__
            model = _Model(gguf, dtype, device, seed)
            for depth in list(left):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(TIME_IS_UP)
                times = model.steps_at(depth, steps, prefill)
                result["rows"].append(_row(model.kv_dtype, depth, times))
                left.remove(depth)
        except Exception as failure:  # whatever a library raises costs its own rows and no others
            require_working_device(failure, device)
            reason = short_reason(failure)
    result["not_measured"] = [{"contender": NAME, "depth": depth, "reason": reason} for depth in left]
    return result


def _row(kv_dtype: str, depth: int, times: list[float]) -> dict[str, Any]:
    found = summarise(times)
    return {
        "contender": NAME, "kv_dtype": kv_dtype, "depth": depth, "ms_per_token": found.median_us / 1e3,
        "ms_p20": found.p20_us / 1e3, "ms_p80": found.p80_us / 1e3, "steps": found.samples,
    }  # fmt: skip


class _Model:
    """A transformers model with one sequence, which only grows."""

    def __init__(self, gguf: Path, dtype: torch.dtype, device: str, seed: int) -> None:
        from transformers import AutoModelForCausalLM, DynamicCache
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": dtype, "attn_implementation": "eager"}
        with redirect_stderr(StringIO()):  # a bar that cannot be switched off
            loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
        self.model: Any = loaded.eval().to(device)
        self.cache: Any = DynamicCache(config=self.model.config)
        self.device, self.held = device, 0
        self.kv_dtype = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
        self.generator = torch.Generator(device).manual_seed(seed)

    def run(self, count: int) -> None:
        """Random tokens behind those held, and wait."""
        shape = (1, count)
        ids = torch.randint(self.model.config.vocab_size, shape, generator=self.generator, device=self.device)
        self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.held += count
        if self.device == "cuda":
            torch.cuda.synchronize()

    def fill(self, count: int) -> None:
        """Random keys and values behind those held, in the layers that have them."""
        for layer in self.cache.layers:
            keys = getattr(layer, "keys", None)
            if isinstance(keys, torch.Tensor) and keys.ndim == 4:
                shape = (*keys.shape[:2], count, keys.shape[3])
                for name in ("keys", "values"):
                    more = torch.empty(shape, dtype=keys.dtype, device=keys.device).normal_(generator=self.generator)
                    setattr(layer, name, torch.cat([getattr(layer, name), more], 2))
        self.held += count

    def steps_at(self, depth: int, steps: int, prefill: int) -> list[float]:
        """Microseconds of each step from `depth` on. Depths must ascend."""
        before = depth - WARM_UP_STEPS
        while self.held < min(before, prefill):
            self.run(min(_CHUNK, min(before, prefill) - self.held))
        if self.held < before:
            self.fill(before - self.held)
        for _ in range(WARM_UP_STEPS):
            self.run(1)
        if (held := self.cache.get_seq_length()) != depth:
            raise RuntimeError(f"transformers' cache holds {held} tokens, expected {depth}")
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self.run(1)
            times.append((time.perf_counter() - start) * 1e6)
        return times
