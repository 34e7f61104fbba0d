"""`DecodeAttention`: a plan and its scratch, made once, for decode loops and CUDA graphs (docs/graphs.md)."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .attention import choose_backend, plan_for
from .checks import check_inputs, check_out
from .device_checks import capturing, current_stream
from .plan import DecodePlan
from .policy import SplitPolicy
from .prepared import NO_KEY, CallMemo, FirstCall, call_key
from .problem import DecodeProblem
from .tuning import Schedule


class DecodeAttention:
    """A plan and its workspace, made once and reused: for decode loops and CUDA graphs.

    problem: the shape of every call. policy: as in `decode_attention`. device: where (default: the current
    CUDA device, else the CPU). schedule: how the work is dealt out to blocks, which changes no byte (default: as tuned
    for the GPU, tuning.py).

    `problem`, `plan`, `workspace_bytes` and `generation` are public, to be read. Each stream gets scratch of its own
    at its first call, and a captured graph takes its scratch from its own pool: no two streams, and no graph and
    stream, ever share any. A call with more rows or a larger capacity than `problem`'s makes a new plan, and
    `generation` counts it (`check_graph`).
    """

    def __init__(
        self,
        problem: DecodeProblem,
        policy: str | SplitPolicy = "auto",
        device: torch.device | str | None = None,
        *,
        schedule: Schedule | None = None,
    ) -> None:
        if not isinstance(problem, DecodeProblem):
            raise TypeError(f"problem: expected a DecodeProblem, got {type(problem).__name__}")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise TypeError(f"schedule: expected a Schedule, got {type(schedule).__name__}")
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.empty(0, device=default if device is None else device).device
        self.problem = problem
        self.generation = 0
        self._policy, self._schedule = policy, schedule
        self.plan = self._plan_for(problem)
        self._lock = threading.Lock()
        self._calls = CallMemo(64)
        self._variants: set[Hashable] = set()
        self._workspaces: dict[int, Tensor] = {}
        self._scratch(self.workspace_bytes)

    @property
    def workspace_bytes(self) -> int:
        """Exact bytes of scratch that one call needs, and that each stream in use holds."""
        return self.plan.workspace_bytes

    @property
    def workspace(self) -> Tensor:
        """The scratch of calls on the current stream: 1-D uint8, `workspace_bytes` long or, once, longer."""
        return self._workspace(self.workspace_bytes)

    def _workspace(self, least_bytes: int) -> Tensor:
        workspace = self._workspaces.get(stream := current_stream(self.device))
        if workspace is None or workspace.numel() < least_bytes:
            workspace = torch.empty(least_bytes, dtype=torch.uint8, device=self.device)
            self._workspaces[stream] = workspace
        return workspace

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seq_lens: Tensor | int,
        *,
        backend: str = "auto",
        out: Tensor | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`decode_attention` with this object's plan and workspace; options are its keyword arguments.

        Tensors of the problem's shape, or of a larger batch or capacity: then this object grows first. Threads
        take turns.

        Raises ValueError where the tensors have another shape, and RuntimeError in a CUDA graph's capture where the
        call would have to compile (run one of the same kind before) or to grow.
        """
        with self._lock:
            key: tuple[Any, ...] | None = None
            try:
                settings = (backend, bool(return_lse))
                key, addresses, uniform_len = call_key(q, k_cache, v_cache, seq_lens, out, None, settings, **options)
                known = self._calls.find(key, uniform_len)
            except NO_KEY:
                key = known = None
            if known is not None:
                return known.run(q, addresses, uniform_len, out, self._scratch(known.workspace_bytes))
            inputs = check_inputs(q, k_cache, v_cache, seq_lens, **options)
            self._check_problem(inputs.problem)
            if q.device != self.device:
                raise ValueError(f"q: expected device {self.device} of this DecodeAttention, got {q.device}")
            check_out(out, q, inputs.problem.v_head_dim)
            name = choose_backend(backend, inputs)
            if inputs.problem != self.problem:
                self._grow(inputs.problem)
            plan = self._plan_for(self.problem, name)  # not self.plan where `backend` asks for another
            first = FirstCall(name, inputs, plan, q, out, return_lse, self._scratch(plan.workspace_bytes))
            if first.variant not in self._variants and capturing(self.device):
                raise RuntimeError(
                    "run: expected a first call before the capture of a CUDA graph, as it compiles; got none of this"
                    f" kind (dtypes, options, strides, alignment) on backend {name}"
                )
            result = first.run()
            self._variants.add(first.variant)
            self._calls.keep(key, first.kept())
            return result

    def check_graph(self, generation: int) -> None:
        """Raises RuntimeError if this object has grown since `generation`, as read when a graph was captured.

        Such a graph still writes to memory of its own, but it reads the cache that it was captured with: capture again.
        """
        if generation != self.generation:
            raise RuntimeError(
                f"graph: expected one captured at generation {self.generation} of this DecodeAttention, grown to "
                f"{self.problem}, got one of generation {generation}: capture it again"
            )

    def _check_problem(self, problem: DecodeProblem) -> None:
        """Refuse what differs by more than a larger batch or capacity."""
        mine = self.problem
        alike = replace(problem, batch=mine.batch, capacity=mine.capacity) == mine
        if not alike or problem.batch < mine.batch or problem.capacity < mine.capacity:
            raise ValueError(f"run: expected tensors of {mine}, or of a larger batch or capacity, got {problem}")

    def _grow(self, problem: DecodeProblem) -> None:
        if capturing(self.device):
            raise RuntimeError(
                f"run: expected tensors of {self.problem} inside the capture of a CUDA graph, got {problem}: call run "
                "with them once before the capture, so that it can grow"
            )
        plan = self._plan_for(problem)
        if plan.workspace_bytes > self.plan.workspace_bytes:
            self._workspaces = {}
        self.problem, self.plan = problem, plan
        self.generation += 1
        self._calls.clear()

    def _plan_for(self, problem: DecodeProblem, backend: str = "auto") -> DecodePlan:
        return plan_for(problem, self.device, self._policy, backend, self._schedule)

    def _scratch(self, workspace_bytes: int) -> Tensor | None:
        """Scratch for a call on the current stream; None inside a capture, where it comes from the graph's pool."""
        return None if workspace_bytes == 0 or capturing(self.device) else self._workspace(workspace_bytes)
