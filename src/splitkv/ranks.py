"""`RankAttention`: a context whose keys are spread over the ranks of a torch.distributed group (docs/ranks.md).

Every rank attends to the keys it holds; one all_gather brings all ranks' (out, lse) together, and each merges them.
Attention over a union of keys follows exactly from the attention over its parts, so the answer is one GPU's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .attention import merge_states
from .checks import DTYPE_NAMES, UnsupportedError, as_integer, check_inputs, check_out, check_vector
from .decode_loop import DecodeAttention
from .policy import SplitPolicy
from .problem import DTYPE_BYTES, DecodeProblem

AGREED = ("batch", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "q_len", "q_dtype", "kv_dtype")
"""Fields of the problem that must be the same on every rank; capacity and page_size need not be."""
REFUSED = -1
"""What a rank says to the others instead of its fields when its own arguments are wrong, so that none waits for it."""
SLOT_BYTES = 16
"""What one rank sends is a multiple of this."""
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
"""Its name from PyTorch 2.13 on, and before; None where torch was built without it, which the constructor refuses."""
LONGEST = 2**30
"""A window of more keys hides none, and would leave 32 bits."""


def part_of(num_keys: int, rank: int, ranks: int, multiple: int = 1) -> range:
    """Keys that a rank holds when rows of `num_keys` are cut into contiguous parts of one size, in the order of the
    ranks: each a multiple of `multiple` (a page, say) but the last, which is shorter or empty. Raises ValueError."""
    for name, value, least in (("num_keys", num_keys, 0), ("ranks", ranks, 1), ("multiple", multiple, 1)):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: expected 0..{ranks - 1}, got {rank}")
    size = -(-num_keys // (ranks * multiple)) * multiple
    return range(min(rank * size, num_keys), min((rank + 1) * size, num_keys))


class RankAttention:
    """`DecodeAttention` over keys that are spread over the ranks of a group, one device each.

    problem: the shape of this rank's calls; capacity and page_size are those of its own cache, all else is the same on
    every rank. policy: as in `decode_attention`. device: where (default: the current CUDA device, else the CPU).
    group: of torch.distributed (default: all ranks), with NCCL for CUDA devices. All ranks construct it together: that
    compares their problems. Raises TypeError, ValueError (on every rank, naming the first that differs).

    A row's keys lie in contiguous parts, in the order of the ranks; a part may be empty, and parts of rows may differ
    in length (`part_of` cuts evenly). `problem`, `plan`, `workspace_bytes`, `rank` and `ranks` are public, to be read.
    Buffers are made once: calls on several streams at a time must use objects of their own.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        policy: str | SplitPolicy = "auto",
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group: expected torch.distributed.init_process_group to be called before, and it was not")
        self._group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group: expected one that this process is a member of, got another")
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.empty(0, device=default if device is None else device).device
        backend = str(dist.get_backend(group))
        if self.device.type == "cuda" and "nccl" not in backend:
            raise ValueError(f"group: expected backend nccl for tensors on {self.device}, got {backend}")
        fault: Exception | None = None
        try:
            self._prepare(problem, policy)
        except (TypeError, ValueError) as error:
            fault = error
        self._agree(None if fault else problem, fault)

    def _prepare(self, problem: DecodeProblem, policy: str | SplitPolicy) -> None:
        if not isinstance(problem, DecodeProblem):
            raise TypeError(f"problem: expected a DecodeProblem, got {type(problem).__name__}")
        if problem.capacity < 1:
            raise ValueError("problem: expected a capacity of at least 1 on every rank (its part may be empty), got 0")
        self.problem, queries = problem, problem.q_len
        # Keys before a row's queries are seen by all of them: as that many more heads of one query, no causal rule.
        common = replace(problem, num_q_heads=problem.num_q_heads * queries, q_len=1)
        self._common = DecodeAttention(common, policy, self.device)
        self.plan = self._common.plan
        shape = (problem.batch, queries, problem.num_q_heads)
        vectors, v_head_dim = math.prod(shape), problem.v_head_dim
        dtype = _dtype(problem.q_dtype) if queries == 1 else torch.float32  # what is merged twice is rounded once
        out_bytes = vectors * v_head_dim * dtype.itemsize
        slot = -(-(out_bytes + 4 * vectors) // SLOT_BYTES) * SLOT_BYTES
        self._send = torch.zeros(slot, dtype=torch.uint8, device=self.device)
        self._received = torch.empty(self.ranks, slot, dtype=torch.uint8, device=self.device)
        self._my_out, self._my_lse = (part[0] for part in _outs_lses(self._send[None], out_bytes, vectors, dtype))
        self._outs, self._lses = _outs_lses(self._received, out_bytes, vectors, dtype)
        self._edges = _Edges(problem, policy, self.device) if queries > 1 else None

    def _agree(self, problem: DecodeProblem | None, fault: Exception | None) -> None:
        """Compare with the other ranks, in one collective; a rank that failed tells the others, then raises."""
        dtypes = list(DTYPE_BYTES)
        values = [REFUSED] * len(AGREED) if problem is None else [getattr(problem, name) for name in AGREED]
        mine = [dtypes.index(value) if isinstance(value, str) else value for value in values]
        everyone = torch.empty(self.ranks * len(AGREED), dtype=torch.int64, device=self.device)
        all_gather(everyone, torch.tensor(mine, device=self.device), group=self._group)
        if fault is not None:
            raise fault
        rows = everyone.view(self.ranks, len(AGREED)).tolist()
        for rank, row in enumerate(rows):
            if REFUSED in row:
                raise ValueError(f"problem: expected arguments that every rank accepts, got an error on rank {rank}")
            for name, first, other in zip(AGREED, rows[0], row, strict=True):
                if other != first:
                    named = [dtypes[n] if name.endswith("dtype") else n for n in (first, other)]
                    raise ValueError(
                        f"problem: expected the same {name} on every rank, got {named[0]} on rank 0 and {named[1]} on "
                        f"rank {rank}"
                    )

    @property
    def workspace_bytes(self) -> int:
        """Bytes of attention scratch that calls on one stream hold; what is sent and received comes on top."""
        return self._common.workspace_bytes + (self._edges.attention.workspace_bytes if self._edges else 0)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seq_lens: Tensor | int,
        *,
        later_keys: Tensor | int | None = None,
        backend: str = "auto",
        out: Tensor | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`decode_attention` over all ranks' keys: every rank calls it, and every rank gets the same answer.

        k_cache, v_cache and seq_lens, and among the options (decode_attention's keyword arguments) starts, mask,
        block_table and scales, are about this rank's keys, counted from its first. q, window, sinks, softmax_scale and
        softcap are the whole row's, the same on every rank. later_keys: [batch] int32 or an int, keys of each row on
        later ranks; needed with a window and with q_len > 1, which look from the row's end. mask: with q_len 1 only.

        Waits for nothing on the host, and may be captured in a CUDA graph after a first call outside. A call that
        raises on one rank leaves the others waiting for it. Raises TypeError, ValueError, UnsupportedError.
        """
        inputs = check_inputs(q, k_cache, v_cache, seq_lens, **options)
        if inputs.problem != self.problem or q.device != self.device:
            raise ValueError(
                f"run: expected tensors of {self.problem} on {self.device}, got {inputs.problem} on {q.device}"
            )
        check_out(out, q, self.problem.v_head_dim)
        window, sinks = options.pop("window", None), options.pop("sinks", None)
        options["backend"] = backend
        if self._edges is None and not window:
            self._attend(q, k_cache, v_cache, seq_lens, options)
        else:
            later_keys = self._check_beyond(later_keys, inputs.mask)
            reach = _Reach(self.problem, seq_lens, later_keys, window or 0, options.pop("starts", None), self.device)
            options["starts"] = reach.common_first
            if self._edges is None:
                self._attend(q, k_cache, v_cache, reach.common_end, options)
            else:
                folded = _fold(inputs.q, self.problem)
                common = self._common.run(folded, k_cache, v_cache, reach.common_end, return_lse=True, **options)
                outs, lses = self._edges.run(inputs.q, k_cache, v_cache, reach, common, options)
                _merge(outs, lses, None, self._my_out, self._my_lse)
        all_gather(self._received.view(-1), self._send, group=self._group)
        return self._merged(q, sinks, out, return_lse)

    def _attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor | int, options: dict[str, Any]
    ) -> None:
        """One query per row: straight into what is sent."""
        here = self._my_out.view(*q.shape[:-1], self.problem.v_head_dim)
        q, here = (tensor.squeeze(1) if tensor.ndim == 4 else tensor for tensor in (q, here))
        _, lse = self._common.run(q, k_cache, v_cache, seq_lens, out=here, return_lse=True, **options)
        self._my_lse.copy_(lse.view(-1))

    def _merged(
        self, q: Tensor, sinks: Tensor | None, out: Tensor | None, return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        result = q.new_empty((*q.shape[:-1], self.problem.v_head_dim)) if out is None else out
        dense = result if result.is_contiguous() else torch.empty_like(result, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        _merge(self._outs, self._lses, sinks, dense.view(-1, self.problem.v_head_dim), lse.view(-1))
        if dense is not result:
            result.copy_(dense)
        return (result, lse) if return_lse else result

    def _check_beyond(self, later_keys: Tensor | int | None, mask: Tensor | None) -> Tensor | int:
        """What is asked where a row's end matters."""
        if mask is not None and self.problem.q_len > 1:
            raise UnsupportedError("mask: supported over several ranks is q_len 1, got a mask with q_len > 1")
        if later_keys is None:
            raise ValueError(
                "later_keys: expected the number of each row's keys on later ranks, which a window and q_len > 1 need, "
                "got None"
            )
        if not isinstance(later_keys, Tensor):
            return as_integer("later_keys", later_keys, "an int or a torch.Tensor")
        check_vector("later_keys", later_keys, self.problem.batch, "batch", (torch.int32, torch.int64))
        if later_keys.device != self.device:
            raise ValueError(f"later_keys: expected device {self.device}, got {later_keys.device}")
        return later_keys


class _Reach:
    """Which of this rank's keys a row's queries see: [batch] and [batch, q_len] int32, made on the device.

    Query i sees [first[i], end[i]). All queries see [common_first, common_end); before and after it lie at most
    q_len - 1 keys each that only some of them see.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        seq_lens: Tensor | int,
        later_keys: Tensor | int,
        window: int,
        starts: Tensor | None,
        device: torch.device,
    ) -> None:
        if not isinstance(seq_lens, Tensor):
            seq_lens = torch.full((problem.batch,), seq_lens, device=device)
        lens = seq_lens.clamp(0, problem.capacity).to(torch.int32)[:, None]
        later = later_keys[:, None].to(torch.int32) if isinstance(later_keys, Tensor) else later_keys
        ends = lens + later + torch.arange(1 - problem.q_len, 1, dtype=torch.int32, device=device)
        first = torch.zeros_like(ends) if starts is None else starts[:, None].clamp(min=0).expand_as(ends)
        if window:
            first = torch.maximum(first, ends - min(window, LONGEST))
        self.first, self.end = torch.minimum(first, lens), torch.minimum(ends, lens).clamp(min=0)
        self.common_first = self.first[:, -1].contiguous()
        self.common_end = torch.maximum(self.end[:, 0], self.common_first)


class _Edges:
    """Keys that some of a row's queries see and others do not, for which every query is a row of its own."""

    def __init__(self, problem: DecodeProblem, policy: str | SplitPolicy, device: torch.device) -> None:
        self._problem = problem
        rows = problem.batch * problem.q_len
        # A contiguous cache is a pool of one page per row: queries of a row then name the same page.
        page_size = problem.page_size or problem.capacity
        self.attention = DecodeAttention(replace(problem, batch=rows, q_len=1, page_size=page_size), policy, device)
        shape = (problem.batch, problem.q_len, problem.capacity // page_size)
        pages = torch.arange(problem.batch, dtype=torch.int32, device=device)
        self._table = pages[:, None, None].expand(shape).contiguous() if problem.page_size is None else None

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        reach: _Reach,
        common: Any,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """(outs [3, vectors, v_head_dim], lses [3, vectors]) in f32: of the common keys (given, folded), of those
        before them that a window leaves to the earlier queries, and of those after them that the later ones see."""
        problem = self._problem
        rows, table = q.flatten(0, 1), self._table
        if table is None:
            table = options["block_table"][:, None].expand(-1, problem.q_len, -1)
        options = options | {"block_table": table.flatten(0, 1), "mask": None, "return_lse": True}
        first = torch.minimum(reach.common_first[:, None], reach.end)
        last = reach.common_end[:, None].expand_as(reach.end).contiguous()
        spans = ((reach.first, first), (last, reach.end))
        before, after = (
            self.attention.run(rows, k_cache, v_cache, end.flatten(), **options | {"starts": begin.flatten()})
            for begin, end in spans
        )
        parts = [(_unfold(common[0], problem), _unfold(common[1][..., None], problem)[..., 0]), before, after]
        outs = torch.stack([out.reshape(-1, problem.v_head_dim) for out, _ in parts])
        return outs.float(), torch.stack([lse.reshape(-1) for _, lse in parts])


def _fold(q: Tensor, problem: DecodeProblem) -> Tensor:
    """[batch, q_len, num_q_heads, dim] -> [batch, num_q_heads * q_len, dim], the heads of a KV head side by side."""
    heads = q.unflatten(2, (problem.num_kv_heads, problem.group_size))
    return heads.transpose(1, 2).flatten(1, 3)


def _unfold(x: Tensor, problem: DecodeProblem) -> Tensor:
    """The inverse of _fold."""
    heads = x.unflatten(1, (problem.num_kv_heads, problem.q_len, problem.group_size))
    return heads.transpose(1, 2).flatten(2, 3)


def _merge(outs: Tensor, lses: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """merge_states of outs [parts, vectors, v_head_dim] into out and lse; sinks [num_q_heads] count once, where a key
    is seen at all."""
    if outs.is_cuda:
        from .backends.triton_parts import merge_parts

        merge_parts(outs=outs, lses=lses, sinks=sinks, out=out, lse=lse)
        return
    outs = outs.float()
    if sinks is not None:
        logits = sinks.repeat(lses.shape[1] // sinks.shape[0]).masked_fill(lses.amax(0) == -torch.inf, -torch.inf)
        outs, lses = torch.cat((outs, torch.zeros_like(outs[:1]))), torch.cat((lses, logits[None]))
    merged, merged_lse = merge_states(outs, lses)
    out.copy_(merged)
    lse.copy_(merged_lse)


def _outs_lses(slots: Tensor, out_bytes: int, vectors: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Views (outs [ranks, vectors, v_head_dim], lses [ranks, vectors] f32) of slots [ranks, bytes]."""
    outs = slots[:, :out_bytes].view(dtype).unflatten(1, (vectors, -1))
    return outs, slots[:, out_bytes : out_bytes + 4 * vectors].view(torch.float32)


def _dtype(name: str) -> torch.dtype:
    return next(dtype for dtype, its in DTYPE_NAMES.items() if its == name)
