"""`splitkv fit`: whether a model fits at a context, on this machine or in a given amount of memory."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..cache.memory import KV_DTYPES, MemoryPlan, ModelGeometry, plan_memory
from ..cache.models import read_model
from ..plan import plan_decode
from ..problem import KNOWN_DEVICES, MAX_CONTEXT, DecodeProblem, DeviceSpec, dtype_name
from . import machine, record

SCHEMA = "splitkv.fit.v1"
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


@dataclass(frozen=True)
class Memory:
    """The memory a model is to fit in, in bytes, and where those numbers come from."""

    free_bytes: int
    total_bytes: int | None
    unified: bool
    source: str


@dataclass(frozen=True)
class Fit:
    """What `splitkv fit` shows."""

    path: str
    plan: MemoryPlan
    memory: Memory


def parse_bytes(text: str, field: str) -> int:
    """A number of bytes: 24500000000, 22.5GiB, 24GB, 512 MiB (any case). ValueError names `field`."""
    match = re.fullmatch(r"(\d+(?:_\d+)*)(?:\.(\d+))?\s*([a-z]*)", text.strip().lower())
    unit = _UNITS.get(match[3]) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"{field}: expected bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB, got {text!r}"
        )
    fraction = match[2] or ""
    return int(match[1] + fraction) * unit // 10 ** len(fraction)


def find_memory(free: str | None, total: str | None, unified: bool) -> Memory:
    """As given by the options; without --free, the current GPU's, or this machine's where there is none."""
    total_bytes = None if total is None else parse_bytes(total, "total")
    if free is not None:
        return Memory(parse_bytes(free, "free"), total_bytes, unified, "as given by --free")
    import torch

    def known(all_bytes: int) -> int:
        return all_bytes if total_bytes is None else total_bytes

    has_gpu = torch.cuda.is_available()
    if has_gpu and not unified:
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        if not getattr(properties, "is_integrated", False):
            free_bytes, all_bytes = machine.memory_bytes("cuda")
            return Memory(free_bytes, known(all_bytes), False, f"free now on {properties.name}")
        unified = True
    free_bytes, all_bytes = machine.host_memory_bytes()
    source = "this machine's MemAvailable"
    if not has_gpu:
        source += ": there is no GPU here, and --free was not given"
    return Memory(free_bytes, known(all_bytes), unified, source)


def attention_workspace(model: ModelGeometry, batch: int) -> int:
    """Scratch of one decode call, in bytes: the most of any layer, KV dtype, known device and backend there, up to
    262,144 keys. Layers run one after another and share it.
    """
    devices = [*KNOWN_DEVICES.values(), DeviceSpec.cpu()]
    most = 0
    for group in model.attention:
        sizes = (batch, model.num_q_heads, group.num_kv_heads, group.head_dim, group.v_head_dim)
        for kv_dtype in ("f32", "bf16", "fp8_e4m3"):
            problem = DecodeProblem(*sizes, capacity=MAX_CONTEXT, kv_dtype=kv_dtype)
            for device in devices:
                most = max(most, plan_decode(problem, device, backend="triton").workspace_bytes)
                with suppress(ValueError):  # not every problem and device is backend cuda's
                    most = max(most, plan_decode(problem, device, backend="cuda").workspace_bytes)
    return most


def make_fit(
    path: str,
    context: int,
    *,
    generated: int = 0,
    batch: int = 1,
    free: str | None = None,
    total: str | None = None,
    unified: bool = False,
    kv_dtypes: str | None = None,
    weights_dtype: str | None = None,
    weights: str | None = None,
    workspace: str | None = None,
    expanded: bool = False,
    whole_windows: bool = False,
) -> Fit:
    """The answer, from the options' text forms; ValueError names the option, or the file and field."""
    names = KV_DTYPES if kv_dtypes is None else [dtype_name(n.strip(), "kv_dtypes") for n in kv_dtypes.split(",")]
    given = None if weights is None else parse_bytes(weights, "weights")
    model = read_model(path, weights_bytes=given, weights_dtype=weights_dtype, expanded=expanded)
    model = model.whole() if whole_windows else model
    memory = find_memory(free, total, unified)
    if batch < 1:
        raise ValueError(f"batch: expected at least 1, got {batch}")
    plan = plan_memory(
        model,
        context,
        generated=generated,
        free_bytes=memory.free_bytes,
        total_bytes=memory.total_bytes,
        unified=memory.unified,
        kv_dtypes=names,
        workspace_bytes=attention_workspace(model, batch) if workspace is None else parse_bytes(workspace, "workspace"),
        batch=batch,
    )
    return Fit(path, plan, memory)


def notes(fit: Fit) -> list[str]:
    """What the sum does not say."""
    plan, model = fit.plan, fit.plan.model
    lines = list(model.notes)
    largest = plan.largest_contexts()
    holding = [name for name, tokens in largest.items() if tokens is not None and tokens >= plan.context]
    if not plan.fits and holding:
        lines.append(f"in {' and '.join(holding)} it would fit: --kv-dtypes {holding[0]}")
    if model.windowed:
        whole = replace(plan, model=model.whole()).largest_contexts()
        texts = [f"{name} {_tokens_text(tokens)}" for name, tokens in whole.items() if tokens != largest[name]]
        change = f"the longest prompts are then {', '.join(texts)}" if texts else "no limit changes by it here"
        lines.append(
            "windowed layers count with their window alone; splitkv's own caches keep all tokens there "
            f"(--whole-windows): {change}"
        )
    if model.max_context is not None and plan.context + plan.generated > model.max_context:
        lines.append(f"the model was made for {model.max_context} tokens; this asks for more")
    return lines


def _tokens_text(tokens: int | None) -> str:
    return "none" if tokens is None else f"{tokens:,}"


def limit(plan: MemoryPlan, tokens: int | None) -> str:
    """What holds a largest context there."""
    if tokens is None:
        return "weights, states and reserve"
    return "splitkv's most" if tokens == MAX_CONTEXT - plan.generated else "memory"


def fit_record(fit: Fit, command: str) -> dict[str, Any]:
    """The JSON form; `terms` add up to `need_bytes`. largest_context: tokens by KV dtype, null where none fits."""
    model = asdict(fit.plan.model)
    return {
        "schema": SCHEMA,
        **record.provenance(),
        "command": command,
        "model": {"path": fit.path, **model},
        **fit.plan.as_dict(),
        "memory_source": fit.memory.source,
        "largest_context": fit.plan.largest_contexts(),
        "notes": notes(fit),
    }
