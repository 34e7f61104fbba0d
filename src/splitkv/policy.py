"""How a row's keys are cut into splits: pure integers, the same on any machine.

Every policy ends in one `SplitRule` of three integers, which the kernels evaluate on the device from each
row's own length. `plan.py` turns a rule into a launch; this file says which rule.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .problem import DecodeProblem, DeviceSpec
from .tiles import CUDA_WARPS, compute_dtype, cuda_warp_keys, suits_cuda, tile_keys

POLICY_VARIABLE = "SPLITKV_POLICY"
PACK_VARIABLE = "SPLITKV_GQA_PACK"
BACKEND_VARIABLE = "SPLITKV_BACKEND"

AUTO_BLOCKS, AUTO_LEAST_BLOCKS, AUTO_MERGE = 256, 128, 64
"""Blocks that `auto` aims at for one long row: two per SM on every large GPU (264 slots on an H200). But a merge of
more than 64 splits takes longer than the second block per SM saves, as long as there is one for each."""
AUTO_F32_BLOCKS = 512
"""The same in f32 by Triton, where a block is one warp; twice that for groups over four heads, whose arithmetic needs
more."""
AUTO_SPLIT_BYTES, AUTO_MIN_KEYS = 128 << 10, 128
"""Least `auto` split: this many bytes of K and V, below which a block's start and the merge cost more than its
share of reading; but AUTO_MIN_KEYS where keys are small (under 512 bytes), as there latency counts, not bytes."""
AUTO_QUANTUM = 64
"""`auto` splits are multiples of this many keys, or of a larger tile, so that no tile straddles two splits."""
MAX_AUTO_SPLITS, MIN_AUTO_SPLITS = 256, 16
"""At most four groups of 64: above that the merge joins groups in another order than runs would (triton_merge.py)."""

WAVES_CTAS_PER_SM, WAVES_MAX_SPLITS, WAVES_MIN_KEYS = 2, 16, 256
CAPACITY_CTAS, CAPACITY_MIN_KEYS, CAPACITY_MAX_SPLITS, CAPACITY_MIN_OVERRIDE = 512, 128, 64, 32
PINNED_TEXT_MAX = 16
SLOTS_MIN_ROWS = 32
SATURATED = 2**63 - 1


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class SplitRule:
    """split_len = max(min_len, ceil(span / target) rounded up to a multiple of quantum), in keys.

    `span` is the number of keys a row attends to. Splits are counted from the first of them; the last one
    may be short; none is empty.
    """

    target: int
    min_len: int = 1
    quantum: int = 1

    def split(self, span: int) -> tuple[int, int]:
        """(split_len, num_splits) of a row that attends to `span` keys; an empty row has no splits."""
        wanted = ceil_div(ceil_div(span, self.target), self.quantum) * self.quantum
        split_len = max(self.min_len, wanted)
        return split_len, ceil_div(span, split_len)

    def max_splits(self, capacity: int) -> int:
        """The most splits that any row of up to `capacity` keys can have."""
        return min(self.target, ceil_div(capacity, self.min_len))


@dataclass(frozen=True)
class SplitPolicy:
    """A named rule for cutting rows into splits. Make one with the constructors below or `parse`."""

    kind: str
    params: tuple[int, ...] = field(default=())

    @staticmethod
    def auto() -> SplitPolicy:
        """The default: about 256 blocks for one long row, from the row's own length and the head geometry."""
        return SplitPolicy("auto")

    @staticmethod
    def waves() -> SplitPolicy:
        """Two waves of blocks over the GPU's SMs, at most 16 splits, each of at least 256 keys."""
        return SplitPolicy("waves")

    @staticmethod
    def capacity(chunk: int | None = None) -> SplitPolicy:
        """From the cache's capacity alone; `chunk` keys per split if given (under 32 it is ignored)."""
        if chunk is None or chunk < CAPACITY_MIN_OVERRIDE:
            return SplitPolicy("capacity")
        return SplitPolicy("capacity", (chunk,))

    @staticmethod
    def length(target: int = 256, min_chunk: int = 64) -> SplitPolicy:
        """At most `target` splits of at least `min_chunk` keys."""
        if target < 1 or min_chunk < 1:
            raise ValueError(f"length policy: expected target and min_chunk >= 1, got {target} and {min_chunk}")
        return SplitPolicy("length", (target, min_chunk))

    @staticmethod
    def legacy(ref_seqs: int = 1) -> SplitPolicy:
        """As many splits as fill the SMs once, counting max(ref_seqs, batch) rows: it reads the batch."""
        return SplitPolicy("legacy", (max(ref_seqs, 1),))

    @staticmethod
    def pinned(n: int) -> SplitPolicy:
        """At most n splits, of ceil(keys / n) keys each; exactly n for rows of more than (n - 1)**2 keys."""
        if n < 1:
            raise ValueError(f"pinned policy: expected at least 1 split, got {n}")
        return SplitPolicy("pinned", (n,))

    @staticmethod
    def parse(text: str) -> SplitPolicy | None:
        """The policy that a text names, or None.

        Trimmed, any case: auto, waves, capacity, length, legacy; 0, off, false, no (one split); a decimal
        (that many splits, held to 1..16); or any policy's own `label`.
        """
        word = text.strip().lower()
        if word in ("off", "false", "no"):
            return SplitPolicy.pinned(1)
        if re.fullmatch(r"[0-9]+", word):
            # Three significant digits decide; int() refuses texts of thousands.
            return SplitPolicy.pinned(min(max(int(word.lstrip("0")[:3] or 0), 1), PINNED_TEXT_MAX))
        match = re.fullmatch(r"(auto|waves|capacity|length|legacy|pinned)(?:\(([0-9]+(?:,[0-9]+)?)\))?", word)
        if match is None:
            return None
        try:
            numbers = tuple(int(n) for n in match[2].split(",")) if match[2] else ()
            return getattr(SplitPolicy, match[1])(*numbers)
        except (TypeError, ValueError):  # a label with too many or impossible numbers, or a bare "pinned"
            return None

    @property
    def label(self) -> str:
        """Short text that `parse` reads back to the same policy."""
        defaults: dict[str, tuple[int, ...]] = {"length": (256, 64), "legacy": (1,)}
        if self.params == defaults.get(self.kind, ()):
            return self.kind
        return f"{self.kind}({','.join(map(str, self.params))})"

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's splits, and so its bytes, ignore how many rows there are."""
        return self.kind != "legacy" and (self.kind != "capacity" or bool(self.params))

    def rule(self, problem: DecodeProblem, device: DeviceSpec) -> SplitRule:
        """The rule that the kernels evaluate for each row."""
        return _RULES[self.kind](self, problem, device)

    def split(self, seq_len: int, problem: DecodeProblem, device: DeviceSpec) -> tuple[int, int]:
        """(split_len, num_splits) of one row of `seq_len` keys. Raises ValueError for lengths no row can have."""
        if not 0 <= seq_len <= problem.capacity:
            raise ValueError(f"seq_len: expected 0..{problem.capacity} (the capacity), got {seq_len}")
        if seq_len == 0 and self.kind == "length":
            raise ValueError("seq_len: the length policy expects at least 1 key, got 0")
        return self.rule(problem, device).split(seq_len)


def _auto(policy: SplitPolicy, problem: DecodeProblem, device: DeviceSpec) -> SplitRule:
    kv_heads = problem.num_kv_heads
    f32 = compute_dtype(problem.q_dtype, problem.kv_dtype) == "f32"
    if f32 and not suits_cuda(problem, problem.group_size):
        wanted = AUTO_F32_BLOCKS * (1 if problem.group_size <= 4 else 2) // kv_heads
    else:
        wanted = min(AUTO_BLOCKS // kv_heads, max(AUTO_MERGE, AUTO_LEAST_BLOCKS // kv_heads))
    target = min(max(wanted, MIN_AUTO_SPLITS), MAX_AUTO_SPLITS)
    quantum = max(AUTO_QUANTUM, tile_keys(problem))
    if problem.kv_dtype.startswith("fp8"):  # whose warps' tiles are larger than Triton's
        quantum = max(quantum, CUDA_WARPS * cuda_warp_keys(problem, device))
    small = problem.kv_bytes_per_key < 512
    keys = AUTO_MIN_KEYS if small else AUTO_SPLIT_BYTES // problem.kv_bytes_per_key
    return SplitRule(target, ceil_div(keys, quantum) * quantum, quantum)


def _waves(policy: SplitPolicy, problem: DecodeProblem, device: DeviceSpec) -> SplitRule:
    wanted = ceil_div(WAVES_CTAS_PER_SM * max(device.sm_count, 1), max(problem.num_q_heads, 1))
    return SplitRule(min(max(wanted, 1), WAVES_MAX_SPLITS), WAVES_MIN_KEYS)


def _capacity(policy: SplitPolicy, problem: DecodeProblem, device: DeviceSpec) -> SplitRule:
    capacity = problem.capacity
    if policy.params:
        chunk = policy.params[0]
        n = min(ceil_div(capacity, chunk), CAPACITY_MAX_SPLITS)
        chunk = max(chunk, ceil_div(capacity, max(n, 1)))  # a clamped n must still reach the last key
    else:
        rows = problem.batch * problem.num_q_heads * problem.q_len
        n = min(ceil_div(CAPACITY_CTAS, rows), ceil_div(capacity, CAPACITY_MIN_KEYS), CAPACITY_MAX_SPLITS)
        chunk = max(CAPACITY_MIN_KEYS, ceil_div(capacity, max(n, 1)))
        n = ceil_div(capacity, chunk)
    return SplitRule(n, chunk) if n >= 2 else SplitRule(1)


def _length(policy: SplitPolicy, problem: DecodeProblem, device: DeviceSpec) -> SplitRule:
    target, min_chunk = policy.params
    return SplitRule(target, min_chunk)


def _legacy(policy: SplitPolicy, problem: DecodeProblem, device: DeviceSpec) -> SplitRule:
    ctas = max(problem.num_q_heads, 1) * max(*policy.params, problem.batch, 1)
    return SplitRule(1 if ctas >= device.sm_count else device.sm_count // ctas)


def _pinned(policy: SplitPolicy, problem: DecodeProblem, device: DeviceSpec) -> SplitRule:
    return SplitRule(policy.params[0])


_RULES = {
    "auto": _auto,
    "waves": _waves,
    "capacity": _capacity,
    "length": _length,
    "legacy": _legacy,
    "pinned": _pinned,
}


def resolve_policy(
    declared: str | SplitPolicy = "auto", environ: Mapping[str, str] | None = None
) -> tuple[SplitPolicy, bool]:
    """(policy, came_from_environment): the one answer to "which policy", for launch and workspace sizing.

    SPLITKV_POLICY wins where it parses; a text that does not parse is reported and the declaration kept. A
    declaration that does not parse is reported and becomes `auto`.
    """
    text = (os.environ if environ is None else environ).get(POLICY_VARIABLE)
    if text is not None:
        chosen = SplitPolicy.parse(text)
        if chosen is not None:
            return chosen, True
        warnings.warn(f"{POLICY_VARIABLE}={text!r} names no policy; keeping {declared!r}", stacklevel=2)
    if isinstance(declared, SplitPolicy):
        return declared, False
    chosen = SplitPolicy.parse(declared)
    if chosen is None:
        warnings.warn(f"policy {declared!r} is not known; using auto", stacklevel=2)
    return chosen or SplitPolicy.auto(), False


def workspace_slots(problem: DecodeProblem, device: DeviceSpec, policy: SplitPolicy) -> int:
    """Upper bound on partial results, for an engine that sizes one workspace before it knows its batches.

    Each slot holds v_head_dim + 2 float32. `legacy` never has more blocks than SMs; every other policy may
    cut each of max(32, batch) rows of every head into its most splits. Saturates at 2**63 - 1. A plan's own
    `workspace_bytes` is exact for its problem and never larger.
    """
    if policy.kind == "legacy":
        return max(device.sm_count, 1) * problem.q_len
    # A rule that reads the batch cuts most at batch 1, and the engine's smallest batch must fit too.
    splits = policy.rule(replace(problem, batch=1), device).max_splits(problem.capacity)
    rows = max(SLOTS_MIN_ROWS, problem.batch) * problem.q_len
    return min(rows * problem.num_q_heads * max(splits, 1), SATURATED)


def packs_gqa(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    width: int | None = None,
    only_head_dim: int | None = None,
    enabled: bool = True,
) -> bool:
    """Whether a block serves a KV head's whole group of query heads, so that K and V are read once.

    Any integer ratio packs. `width` and `only_head_dim` narrow the gate to one geometry, as kernels built
    for a single one need. The ratio is tested by multiplication: 25/4 heads pack at no width.
    """
    if not enabled or num_kv_heads < 1 or num_q_heads < num_kv_heads:
        return False
    ratio = num_q_heads // num_kv_heads if width is None else width
    return num_q_heads == num_kv_heads * ratio and only_head_dim in (None, head_dim)


def parse_switch(text: str, declared: bool) -> bool:
    """1, on, true, yes or 0, off, false, no (any case, trimmed); anything else keeps the declaration."""
    return {**dict.fromkeys(("1", "on", "true", "yes"), True), **dict.fromkeys(("0", "off", "false", "no"), False)}.get(
        text.strip().lower(), declared
    )


def resolve_backend(declared: str) -> str:
    """The backend asked for: SPLITKV_BACKEND stands in for `auto` alone."""
    named = os.environ.get(BACKEND_VARIABLE, "").strip().lower() if declared == "auto" else ""
    return named or declared
