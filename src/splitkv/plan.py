"""From a problem, a device and a policy to one launch: `plan_decode`. Pure integers, no torch.

Three things make a launch:
- the **rule** that cuts each row into splits (policy.py): it fixes the bytes of the answer;
- the **tile**, the block of keys that one step of the kernel reads (tiles.py): it fixes the bytes too;
- the **schedule**, which blocks compute which splits: decided here; it never changes a byte, so it may read the
  batch.

Splits are the leaves of a tree in which four neighbours join, left to right, at every level. One block may
compute an aligned run of 1, 4 or 16 splits of a row (a *unit*) and join them itself along that tree; the merge
joins the rest. Whichever block did a join, its operands and its order are the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

from .policy import (
    PACK_VARIABLE,
    SplitPolicy,
    SplitRule,
    ceil_div,
    packs_gqa,
    parse_switch,
    resolve_backend,
    resolve_policy,
)
from .problem import DTYPE_BYTES, KIB, DecodeProblem, DeviceSpec
from .tiles import (
    TileConfig,
    cuda_shared,
    cuda_splits_per_block,
    cuda_tile,
    most_splits_per_block,
    runs_on_cuda,
    tile_config,
    triton_stages,
)
from .tuning import Schedule, lookup

CUDA_WAVES, UNEVEN_SHARE_BYTES = 4, 768 * KIB
"""Loaded launches of backend cuda have so many blocks for each that the GPU holds (cuda_share.cuh, Share). They work
where rows differ and a block's share of K and V is this much: below, their starts cost more than they even out."""
CPU_TILE_KEYS = 64
"""TILE_KEYS of cpu_scores.h."""
LEAST_RUN_KEYS = 64
"""Of any run on backend cuda, whose kernels round keys per run down: so they make 1/64 more units at most."""
MERGE_TASKS_PER_SM, MERGE_TEAM_TASKS_PER_SM = 2, 8
"""Merge tasks per SM (backend cuda) up to which the warps that share one ask for all parts of a row at once, and up to
which four share one. More tasks have a warp each."""


@dataclass(frozen=True)
class DecodePlan:
    """One launch geometry for every length up to the problem's capacity. Made by `plan_decode`.

    backend: whose tile and schedule this is: cuda, triton, or cpu.
    num_splits, split_len: of a row at capacity. max_splits: most splits of any shorter row. max_run: most
    splits that one block joins by itself (1: the schedule is one split per block). target_units: units per
    KV head that a loaded launch is cut into. max_units: partial results per query head that the workspace
    holds. rows_per_block: query vectors per block, `row_blocks` blocks per KV head. schedule, schedule_source: what the
    last three follow from, and which table or default it is of (tuning.py).
    """

    problem: DecodeProblem
    device: DeviceSpec
    policy: SplitPolicy
    from_environment: bool
    rule: SplitRule
    tile: TileConfig
    backend: str
    num_splits: int
    split_len: int
    max_splits: int
    max_run: int
    target_units: int
    max_units: int
    rows_per_block: int
    schedule: Schedule
    schedule_source: str

    @property
    def row_blocks(self) -> int:
        return ceil_div(self.problem.rows_per_kv_head, self.rows_per_block)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of the split kernel: (units, KV heads x row blocks, rows); rows is 1 where units span rows. On backend
        cuda (KV heads x row blocks, blocks, 1): blocks take units until there are none."""
        heads = self.problem.num_kv_heads * self.row_blocks
        if self.backend == "cuda":
            waves = CUDA_WAVES if self.max_run > 1 and self.problem.batch > 1 else 1
            return (heads, waves * self.blocks_at_once, 1)
        if self.max_run > 1:
            return (self.max_units, heads, 1)
        return (max(self.max_splits, 1), heads, self.problem.batch)

    @property
    def blocks_per_sm(self) -> int:
        """Blocks of backend cuda that share an SM's memory: one, with twice as many tiles in flight, where there are
        SMs for all units."""
        units = self.problem.batch * self.max_splits * self.problem.num_kv_heads * self.row_blocks
        return 1 if units <= self.device.sm_count else self.schedule.blocks_per_sm

    @property
    def blocks_at_once(self) -> int:
        """Blocks of backend cuda that the GPU holds, per KV head and row block."""
        heads = self.problem.num_kv_heads * self.row_blocks
        return max(min(self.blocks_per_sm * self.device.sm_count // heads, self.max_units), 1)

    @property
    def cluster(self) -> int:
        """Blocks of backend cuda that share two neighbouring SMs: of two KV heads, which read the same tokens. Measured
        on Hopper, where a batch gains 0.3 to 1.5 %; one short row would start 0.2 us later."""
        paired = self.problem.batch > 1 and self.grid[0] % 2 == 0 and self.device.capability == (9, 0)
        return 2 if self.backend == "cuda" and paired else 1

    @property
    def num_stages(self) -> int:
        """Tiles in flight: the tile's own number and what the schedule adds to it."""
        more = self.schedule.more_stages
        if self.backend == "cuda":
            return cuda_shared(self.problem, self.rows_per_block, self.device, self.blocks_per_sm, more)[0]
        return triton_stages(self.tile, self.problem, self.device, more)

    @property
    def least_run_keys(self) -> int:
        """Keys that a run has at least, whatever the load, where max_run allows: it takes more splits until it does."""
        wanted = self.schedule.least_run_kib * KIB // self.problem.kv_bytes_per_key
        return max(wanted, LEAST_RUN_KEYS) if self.backend == "cuda" else 0

    @property
    def uneven_keys(self) -> int:
        """Keys of a block from which on rows of several lengths are dealt to more blocks (backend cuda)."""
        return UNEVEN_SHARE_BYTES // self.problem.kv_bytes_per_key

    @property
    def splits(self) -> bool:
        """Whether any row can be cut at all; if not there is no workspace and no merge."""
        return self.max_splits > 1

    @property
    def merge_columns(self) -> int:
        """Columns of one query vector that make a task of backend cuda's merge: fewer where tasks are few."""
        few = self._merge_tasks(64) <= MERGE_TASKS_PER_SM * self.device.sm_count
        return 64 if few or self.problem.v_head_dim <= 64 else 128

    @property
    def merge_tasks(self) -> int:
        return self._merge_tasks(self.merge_columns)

    def _merge_tasks(self, columns: int) -> int:
        vectors = self.problem.batch * self.problem.num_q_heads * self.problem.q_len
        return vectors * ceil_div(self.problem.v_head_dim, columns)

    @property
    def merge_team(self) -> int:
        """Warps that share a merge task and take four parts each at a time: 16, 8 or 4; or 1, which takes eight."""
        if self.merge_tasks <= MERGE_TASKS_PER_SM * self.device.sm_count:
            return 16 if self.max_splits > 32 else 8 if self.max_splits > 16 else 4
        return 4 if self.merge_tasks <= MERGE_TEAM_TASKS_PER_SM * self.device.sm_count else 1

    @property
    def workspace_bytes(self) -> int:
        """Exact bytes of scratch: max_units x query vectors x (v_head_dim + 2) float32."""
        if not self.splits:
            return 0
        vectors = self.problem.num_q_heads * self.problem.q_len
        return self.max_units * vectors * (self.problem.v_head_dim + 2) * DTYPE_BYTES["f32"]

    @property
    def batch_invariant(self) -> bool:
        return self.policy.batch_invariant

    @property
    def floor_us(self) -> float:
        """Microseconds to read K and V once at the device's bandwidth; nan where that is unknown."""
        bandwidth = self.device.bandwidth_bytes_s
        return self.problem.kv_bytes() / bandwidth * 1e6 if bandwidth else float("nan")

    @property
    def waves(self) -> float:
        """Blocks over SMs, for rows at capacity."""
        blocks = self.num_splits * self.problem.num_kv_heads * self.row_blocks * self.problem.batch
        return blocks / max(self.device.sm_count, 1)

    def explain(self) -> str:
        """The plan in words, one fact a line, with the reason where there was a choice."""
        problem, tile = self.problem, self.tile
        source = "from SPLITKV_POLICY" if self.from_environment else "as declared"
        invariance = (
            "yes: no row's splits depend on how many rows there are"
            if self.batch_invariant
            else f"no: {self.policy.kind} reads the batch"
        )
        schedule = (
            "one split per block"
            if self.max_run == 1
            else f"up to {self.max_run} splits per block, about {self.target_units} units per KV head, by load"
        )
        device = self.device
        rate = f"{device.bandwidth_bytes_s / 1e12:.2f} TB/s ({'measured' if device.measured else 'datasheet'})"
        floor = f"{self.floor_us:.1f} us at {rate}" if device.bandwidth_bytes_s else "unknown without a bandwidth"
        return "\n".join(
            (
                f"device          {device.name}, {device.sm_count} {'cores' if device.is_cpu else 'SMs'}",
                f"policy          {self.policy.label} ({source})",
                f"splits          {self.num_splits} of {self.split_len} keys at {problem.capacity} keys",
                f"rule            max({self.rule.min_len}, ceil(keys / {self.rule.target}) "
                f"in multiples of {self.rule.quantum})",
                f"schedule        {schedule} ({self.schedule_source})",
                f"backend         {self.backend}",
                f"grid            {self.grid}, {self.waves:.2f} blocks per SM",
                f"tile            {tile.block_n} keys x {tile.block_m} query vectors, {tile.num_warps} warps, "
                f"{self.num_stages} stages, products in {tile.compute}",
                f"workspace       {self.workspace_bytes} bytes",
                f"bytes read      {problem.kv_bytes()}",
                f"floor           {floor}",
                f"batch-invariant {invariance}",
            )
        )


def plan_decode(
    problem: DecodeProblem,
    device: DeviceSpec,
    policy: str | SplitPolicy = "auto",
    backend: str = "auto",
    *,
    schedule: Schedule | None = None,
) -> DecodePlan:
    """The plan for a problem on a device. SPLITKV_POLICY overrides `policy`; SPLITKV_GQA_PACK=0 gives every query
    head blocks of its own. backend: auto takes SPLITKV_BACKEND where that is set, else cuda where it can run, else
    triton (on a CPU: cpu); any other name plans for that backend. Calls on this machine use the plan of
    DeviceSpec.current(). schedule: None takes the tuned or default one (tuning.py). Raises ValueError where backend
    cuda cannot take the problem."""
    chosen, from_environment = resolve_policy(policy)
    wanted = parse_switch(os.environ.get(PACK_VARIABLE, ""), declared=True)
    packed = packs_gqa(problem.num_q_heads, problem.num_kv_heads, problem.head_dim, enabled=wanted)
    return _plan(problem, device, chosen, from_environment, packed, resolve_backend(backend), schedule)


@lru_cache(maxsize=4096)
def _plan(
    problem: DecodeProblem,
    device: DeviceSpec,
    policy: SplitPolicy,
    from_environment: bool,
    packed: bool,
    backend: str,
    given: Schedule | None,
) -> DecodePlan:
    rule = policy.rule(problem, device)
    split_len, num_splits = rule.split(problem.capacity)
    max_splits = max(rule.max_splits(problem.capacity), 1)
    rows = problem.rows_per_kv_head if packed else problem.q_len
    on_cuda = backend in ("auto", "cuda") and runs_on_cuda(problem, rows, device)
    if backend == "cuda" and not on_cuda:
        able = "up to 16 query vectors per KV head in 16 bits, up to 8 over f32 caches"
        raise ValueError(
            f"backend: cuda takes {able}, got {problem}"
            if device.compiles_cuda
            else f"backend: cuda expects cuda-bindings and NVRTC, which {device.name} has not"
        )
    name = "cuda" if on_cuda else "cpu" if device.is_cpu else "triton"
    tile = (cuda_tile if on_cuda else tile_config)(problem, rows, device)
    schedule, source = lookup(problem, rows, device, name) if given is None else (given, "as given")
    max_run, target_units = _schedule(problem, rows, device, rule, tile, max_splits, on_cuda, schedule)
    return DecodePlan(
        problem=problem,
        device=device,
        policy=policy,
        from_environment=from_environment,
        rule=rule,
        tile=tile,
        backend=name,
        num_splits=max(num_splits, 1),
        split_len=split_len,
        max_splits=max_splits,
        max_run=max_run,
        target_units=target_units,
        max_units=_max_units(problem.batch, max_splits, max_run, target_units),
        rows_per_block=min(rows, tile.block_m),
        schedule=schedule,
        schedule_source=source,
    )


def _schedule(
    problem: DecodeProblem,
    rows: int,
    device: DeviceSpec,
    rule: SplitRule,
    tile: TileConfig,
    max_splits: int,
    on_cuda: bool,
    schedule: Schedule,
) -> tuple[int, int]:
    """(max_run, target_units). Runs pay only under load. Elsewhere than on backend cuda splits must be whole tiles."""
    heads = 1 if device.is_cpu else problem.num_kv_heads
    sm_count = max(device.sm_count, 1)
    target_units = ceil_div(schedule.units_per_sm * sm_count, heads)
    if problem.batch * max_splits <= ceil_div(schedule.loaded_splits_per_sm * sm_count, heads):
        return 1, target_units
    if on_cuda:
        return min(cuda_splits_per_block(tile, problem, rows), schedule.max_run), target_units
    if rule.quantum % (CPU_TILE_KEYS if device.is_cpu else tile.block_n):
        return 1, target_units
    if device.is_cpu:
        return schedule.max_run, target_units
    return min(most_splits_per_block(tile, problem), schedule.max_run), target_units


def _max_units(batch: int, max_splits: int, max_run: int, target_units: int) -> int:
    """Units of a whole launch, per KV head, at most.

    A row of `span` keys is cut into runs of at least total/target_units keys, so all rows together make at
    most target_units units and one more each; rows whose run is held to max_run make max_splits/max_run. What rounding
    down adds is at most one in LEAST_RUN_KEYS.
    """
    every_split = batch * max_splits
    if max_run == 1:
        return every_split
    more = ceil_div(target_units, LEAST_RUN_KEYS) + 1
    return min(every_split, target_units + more + batch * ceil_div(max_splits, max_run))


def workspace_bytes(problem: DecodeProblem, device: DeviceSpec, policy: str | SplitPolicy = "auto") -> int:
    """Exact scratch bytes of the plan for this problem: what `workspace=` must hold at least."""
    return plan_decode(problem, device, policy).workspace_bytes
