"""Will it fit? The memory a model needs at a context, before anything is allocated. Pure integers, no torch.

    need = weights + KV bytes per token x (prompt + generated + 1) + recurrent state + workspace + 512 MiB

Every size is in bytes. The KV dtypes are tried in order and the first that fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from ..problem import DTYPE_BYTES, KIB, MAX_CONTEXT, MIB, dtype_name

RESERVE_BYTES = 512 * MIB
"""Left for activations, the CUDA context and fragmentation."""
UNIFIED_RESERVE_BYTES = 16 * KIB * MIB
"""Where the GPU shares main memory, this much of MemAvailable is left to the system (16 GiB)."""
KV_DTYPES = ("f32", "f16")
"""Tried in this order unless the caller says otherwise."""
CO_TENANT, EXCEEDS_DEVICE = "co_tenant", "exceeds_device"
"""Kinds of refusal: others hold the memory that is missing, or an empty device would be too small as well."""


def _whole(value: Any, name: str, least: int) -> int:
    try:
        number = int(index(value))
    except TypeError:
        raise ValueError(f"{name}: expected an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number


def _tidy(record: Any, least: dict[str, int]) -> None:
    for name, floor in least.items():
        object.__setattr__(record, name, _whole(getattr(record, name), name, floor))


@dataclass(frozen=True)
class AttentionLayers:
    """`layers` attention layers that keep the same per token.

    v_head_dim: of V (0: as head_dim). window: most tokens a layer keeps, None for all of them. v_in_k: V is
    the first columns of K (latent attention), so it takes no memory of its own.
    """

    layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    window: int | None = None
    v_in_k: bool = False

    def __post_init__(self) -> None:
        _tidy(self, {"layers": 1, "num_kv_heads": 1, "head_dim": 1, "v_head_dim": 0})
        object.__setattr__(self, "v_head_dim", self.v_head_dim or self.head_dim)
        if self.window is not None:
            _tidy(self, {"window": 1})

    def bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of K and V of one token of one row, in all of these layers together."""
        columns = self.head_dim + (0 if self.v_in_k else self.v_head_dim)
        return self.layers * self.num_kv_heads * columns * DTYPE_BYTES[dtype_name(kv_dtype, "kv_dtype")]

    def tokens_held(self, tokens: int) -> int:
        """Tokens that a row of `tokens` keeps here."""
        return tokens if self.window is None else min(tokens, self.window)


@dataclass(frozen=True)
class ModelGeometry:
    """What of a model decides its memory; `splitkv.cache.models` reads one from a config.json or a GGUF file.

    weights_bytes: all weights as loaded. attention: the layers that keep keys and values, grouped.
    state_bytes: recurrent state of one row, whatever its length (0: none). parameters: count, for display.
    max_context: tokens that the model was made for, None if unknown. notes: what was not counted.
    """

    name: str
    weights_bytes: int
    num_q_heads: int
    attention: tuple[AttentionLayers, ...]
    state_bytes: int = 0
    parameters: int = 0
    max_context: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _tidy(self, {"weights_bytes": 0, "num_q_heads": 1, "state_bytes": 0, "parameters": 0})
        object.__setattr__(self, "attention", tuple(self.attention))

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of K and V that one more token of one row takes while every window still grows."""
        return sum(group.bytes_per_token(kv_dtype) for group in self.attention)

    @property
    def windowed(self) -> bool:
        """Whether some layers keep no more than a window's tokens."""
        return any(group.window is not None for group in self.attention)

    def whole(self) -> ModelGeometry:
        """The same model over caches that keep all tokens in every layer, windows or not, as splitkv's own do."""
        return replace(self, attention=tuple(replace(group, window=None) for group in self.attention))

    def kv_bytes(self, kv_dtype: str, tokens: int) -> int:
        """Bytes of K and V of one row that holds `tokens`."""
        return sum(group.bytes_per_token(kv_dtype) * group.tokens_held(tokens) for group in self.attention)


@dataclass(frozen=True)
class MemoryPlan:
    """The verdict and the sum behind it. Made by `plan_memory`; every size in bytes.

    kv_dtype: the first that fits, or after a refusal the smallest that was tried; `terms` and `need_bytes`
    are for it. tried: need of each KV dtype up to there. refusal: None, "co_tenant" (an empty device could
    hold it) or "exceeds_device". available_bytes: free memory, less 16 GiB where memory is unified.
    """

    model: ModelGeometry
    context: int
    generated: int
    batch: int
    kv_dtype: str
    refusal: str | None
    tried: dict[str, int]
    workspace_bytes: int
    free_bytes: int
    total_bytes: int | None
    unified: bool

    @property
    def fits(self) -> bool:
        return self.refusal is None

    @property
    def tokens(self) -> int:
        """Tokens a row holds in the end: prompt, generated, and the one being computed."""
        return self.context + self.generated + 1

    @property
    def terms(self) -> dict[str, int]:
        """Bytes by what they are for; their sum is need_bytes."""
        return _terms(self.model, self.kv_dtype, self.tokens, self.batch, self.workspace_bytes)

    @property
    def need_bytes(self) -> int:
        return sum(self.terms.values())

    @property
    def available_bytes(self) -> int:
        return _available(self.free_bytes, self.unified)

    @property
    def arithmetic(self) -> str:
        """The sum, the comparison and the verdict, in one line of exact bytes."""
        terms = self.terms
        parts = [
            f"{group.bytes_per_token(self.kv_dtype):,} B/token x {group.tokens_held(self.tokens):,} tokens"
            for group in self.model.attention
        ]
        per_row = " + ".join(parts) or "0"
        kv = per_row if self.batch == 1 else f"{self.batch} rows x ({per_row})"
        words = [f"weights {terms['weights']:,}", f"{self.kv_dtype} KV {kv} = {terms['kv_cache']:,}"]
        words += [f"recurrent state {terms['recurrent_state']:,}"] if terms["recurrent_state"] else []
        words += [f"workspace {terms['workspace']:,}", f"reserve {terms['reserve']:,}"]
        sign = "<=" if self.need_bytes <= self.available_bytes else ">"
        have = f"{self.available_bytes:,} B free"
        if self.unified:
            have = f"{self.available_bytes:,} B ({self.free_bytes:,} available - {UNIFIED_RESERVE_BYTES:,})"
        return f"{' + '.join(words)} = {self.need_bytes:,} B {sign} {have}: {self._verdict()}"

    def _verdict(self) -> str:
        if self.refusal is None:
            return f"fits with {self.kv_dtype} KV"
        if self.total_bytes is None:
            return f"refused, {self.refusal} (total memory not given)"
        return f"refused, {self.refusal} (an empty device has {_available(self.total_bytes, self.unified):,} B)"

    def largest_context(self, kv_dtype: str) -> int | None:
        """Longest prompt, in tokens, that fits in this KV dtype, all else equal; None if not even 0 does."""
        name = dtype_name(kv_dtype, "kv_dtype")

        def fits(context: int) -> bool:
            tokens = context + self.generated + 1
            need = sum(_terms(self.model, name, tokens, self.batch, self.workspace_bytes).values())
            return need <= self.available_bytes

        if not fits(0):
            return None
        low, high = 0, MAX_CONTEXT - self.generated
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def largest_contexts(self, kv_dtypes: Iterable[str] = tuple(DTYPE_BYTES)) -> dict[str, int | None]:
        """largest_context of each KV dtype."""
        return {kv_dtype: self.largest_context(kv_dtype) for kv_dtype in kv_dtypes}

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the terms add up to need_bytes exactly."""
        return {
            "context": self.context,
            "generated": self.generated,
            "tokens": self.tokens,
            "batch": self.batch,
            "fits": self.fits,
            "kv_dtype": self.kv_dtype,
            "refusal": self.refusal,
            "terms": self.terms,
            "need_bytes": self.need_bytes,
            "tried": dict(self.tried),
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
            "unified": self.unified,
            "available_bytes": self.available_bytes,
            "arithmetic": self.arithmetic,
        }


def _terms(model: ModelGeometry, kv_dtype: str, tokens: int, batch: int, workspace_bytes: int) -> dict[str, int]:
    return {
        "weights": model.weights_bytes,
        "kv_cache": batch * model.kv_bytes(kv_dtype, tokens),
        "recurrent_state": batch * model.state_bytes,
        "workspace": workspace_bytes,
        "reserve": RESERVE_BYTES,
    }


def _available(nbytes: int, unified: bool) -> int:
    return max(nbytes - UNIFIED_RESERVE_BYTES, 0) if unified else nbytes


def plan_memory(
    model: ModelGeometry,
    context: int,
    *,
    generated: int = 0,
    free_bytes: int,
    total_bytes: int | None = None,
    unified: bool = False,
    kv_dtypes: Sequence[str] = KV_DTYPES,
    workspace_bytes: int = 0,
    batch: int = 1,
) -> MemoryPlan:
    """Whether `batch` rows of `context` prompt tokens plus `generated` fit, and in which KV dtype.

    free_bytes: free on the device now; with `unified`, MemAvailable, of which 16 GiB are left to the system.
    total_bytes: all of the device's memory, which tells co_tenant from exceeds_device; None means that what
    is free is all there is. workspace_bytes: attention scratch. need == available fits. ValueError for a
    prompt and generated tokens over 262,144 together, and for anything else out of range.
    """
    if not isinstance(model, ModelGeometry):
        raise TypeError(
            "model: expected a ModelGeometry (splitkv.cache.models reads one from a config.json or GGUF file), "
            f"got {type(model).__name__}"
        )
    context, generated = _whole(context, "context", 0), _whole(generated, "generated", 0)
    if context + generated > MAX_CONTEXT:
        raise ValueError(
            f"context: expected at most {MAX_CONTEXT} tokens with the generated, got {context + generated}"
        )
    batch, workspace_bytes = _whole(batch, "batch", 1), _whole(workspace_bytes, "workspace_bytes", 0)
    free_bytes = _whole(free_bytes, "free_bytes", 0)
    if total_bytes is not None:
        total_bytes = _whole(total_bytes, "total_bytes", free_bytes)
    if isinstance(kv_dtypes, str):
        raise ValueError(f"kv_dtypes: expected a sequence of dtypes, got {kv_dtypes!r}")
    names = [dtype_name(name, "kv_dtypes") for name in kv_dtypes]
    if not names:
        raise ValueError("kv_dtypes: expected at least one dtype, got none")

    tried: dict[str, int] = {}
    for name in names:
        tried[name] = sum(_terms(model, name, context + generated + 1, batch, workspace_bytes).values())
        if tried[name] <= _available(free_bytes, unified):
            kv_dtype, refusal = name, None
            break
    else:
        kv_dtype = min(tried, key=lambda name: tried[name])
        whole = _available(free_bytes if total_bytes is None else total_bytes, unified)
        refusal = CO_TENANT if tried[kv_dtype] <= whole else EXCEEDS_DEVICE
    return MemoryPlan(
        model, context, generated, batch, kv_dtype, refusal, tried, workspace_bytes, free_bytes, total_bytes, unified
    )
