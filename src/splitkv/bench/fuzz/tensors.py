"""A case as tensors: first what they hold (`Values`), then where it lies (`Call`).

All buffers of a call lie in one arena of bytes, full of poison, with bands between them. So one comparison of bytes
afterwards says whether anything was written beside the outputs, and whatever is read beside the valid keys is poison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Geometry

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
}
BAND_BYTES = 512
NORMALS = (1 << 22) - 3
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HIDDEN = (-torch.inf, -1e4)
POISON = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "6e4": 6e4, "zero": 0.0}
GARBAGE_PAGES = (-1, 2**31 - 1, -(2**31), 0)  # the last stands for a page that another row may hold
SPARE_PAGES = 2


# ---- where things lie: pure integers -----------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Shape and strides of one tensor in elements, and the bytes from an aligned address to its first element."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start_bytes: int = 0

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.sizes:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.sizes, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize


def _pitched(dtype: torch.dtype, sizes: tuple[int, ...], pad: int = 0, offset: int = 0) -> Layout:
    """Row-major, with `pad` more elements after every dimension but the last."""
    steps = [1]
    for size in sizes[:0:-1]:
        steps.append(max(size, 1) * steps[-1] + pad)
    return Layout(dtype, sizes, tuple(steps[::-1]), offset * dtype.itemsize)


def layouts(case: Case, geometry: Geometry) -> dict[str, Layout]:
    """Every tensor of a call but the workspace, by argument name; "pool" is what K and V are views of."""
    batch, pad, offset = geometry.batch, geometry.rest_pad, geometry.offset
    queries = () if case.q_len == 0 else (case.q_len,)
    rows = (batch, *queries, case.num_q_heads)
    q_dtype = DTYPES[case.q_dtype]
    found = {"q": _pitched(q_dtype, (*rows, case.head_dim), pad, offset), **_cache_layouts(case, geometry)}
    if geometry.page_size is not None:
        found["block_table"] = _pitched(torch.int32, (batch, geometry.columns), pad, offset)
    if geometry.lens != "int":
        found["seq_lens"] = _pitched(DTYPES[geometry.lens], (batch,), 0, offset)
    if case.starts is not None:
        found["starts"] = _pitched(torch.int32, (batch,), 0, offset)
    if case.mask is not None:
        found["mask"] = _mask_layout(case, geometry)
    if case.sinks is not None:
        found["sinks"] = _pitched(torch.float32, (case.num_q_heads,), 0, offset)
    for name, kind in (("k_scale", case.k_scale), ("v_scale", case.v_scale)):
        if kind in ("0-d", "one", "head"):
            sizes = {"0-d": (), "one": (1,), "head": (case.num_kv_heads,)}[kind]
            step = 1 if offset % 16 == 0 else 3
            found[name] = Layout(torch.float32, sizes, tuple(step for _ in sizes), offset * 4)
    out_pad, out_offset = (pad, offset) if geometry.own_out else (0, 0)
    found["out"] = _pitched(q_dtype, (*rows, case.v_head_dim), out_pad, out_offset)
    if case.return_lse:
        found["lse"] = _pitched(torch.float32, rows)
    return found


def _cache_layouts(case: Case, geometry: Geometry) -> dict[str, Layout]:
    """K and V: separate, side by side in one pool, or V inside K. V's start is counted from K's where they share."""
    dtype, heads = DTYPES[case.kv_dtype], case.num_kv_heads
    one_for_all = geometry.page_size is None and case.shared
    blocks = geometry.batch if geometry.page_size is None else _num_pages(case, geometry)
    keys = geometry.capacity if geometry.page_size is None else geometry.page_size
    interleaved = geometry.order == "interleaved"
    widest = max(case.head_dim, case.v_head_dim)

    def one(dim: int, pads: tuple[int, int, int], start: int = 0) -> Layout:
        width = (widest if interleaved else dim) + pads[0]
        if geometry.order == "hnd":
            token, head = width, keys * width + pads[1]
            block = heads * head + pads[2]
        else:
            token, head = heads * width + pads[1], width
            block = keys * token * (2 if interleaved else 1) + pads[2]
        strides = (0 if one_for_all else block, token, head, 1)
        start = keys * token * start + geometry.offset
        return Layout(dtype, (blocks, keys, heads, dim), strides, start * dtype.itemsize)

    pads = geometry.pads
    if case.latent:
        k = one(case.head_dim, pads)
        return {"k_cache": k, "v_cache": Layout(dtype, (*k.sizes[:3], case.v_head_dim), k.strides, k.start_bytes)}
    if interleaved:
        return {"k_cache": one(case.head_dim, pads), "v_cache": one(case.v_head_dim, pads, start=1)}
    return {"k_cache": one(case.head_dim, pads), "v_cache": one(case.v_head_dim, (pads[1], pads[2], pads[0]))}


def _mask_layout(case: Case, geometry: Geometry) -> Layout:
    dtype = DTYPES[str(case.mask)]
    full = (geometry.batch, case.num_q_heads, case.queries, geometry.capacity)
    sizes = tuple(size if real else 1 for size, real in zip(full, case.mask_dims, strict=True))
    if geometry.mask_order == "transposed":
        turned = _pitched(dtype, sizes[::-1], geometry.rest_pad, geometry.offset)
        return Layout(dtype, sizes, turned.strides[::-1], turned.start_bytes)
    return _pitched(dtype, sizes, geometry.rest_pad, geometry.offset)


def _columns(first: int, end: int, page_size: int) -> range:
    """Columns of the table whose pages hold keys [first, end)."""
    return range(first // page_size, -(-end // page_size)) if first < end else range(0)


def _num_pages(case: Case, geometry: Geometry) -> int:
    """Upper bound on the pages that the rows of either call need, and some more."""
    page_size = geometry.page_size or 1
    ranges = [_columns(*case.key_range(row), page_size) for row in range(case.base.batch)]
    if case.shared:
        return max(one.stop for one in ranges) + SPARE_PAGES
    return geometry.batch * max(map(len, ranges)) + SPARE_PAGES


# ---- what they hold ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """Contents on the CPU, by row of the first call: q [rows, queries, heads, dim], k and v [rows or 1, keys, heads,
    dim], mask [rows or 1, heads or 1, queries or 1, keys or 1], scales a number or f32 of its heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None


@cache
def _normals(dtype: torch.dtype) -> Tensor:
    """Unit-normal values that every case takes its own stretch of: drawing anew would take most of the time."""
    if dtype == torch.float32:
        return torch.randn(NORMALS, generator=torch.Generator().manual_seed(1))
    return _normals(torch.float32).to(dtype)


@cache
def _random_bytes() -> Tensor:
    return torch.randint(0, 256, (NORMALS,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


def _stretch(source: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """`shape` values of an endless repetition of the source, from `start` on."""
    count, parts = math.prod(shape), []
    while count > 0:
        start %= source.shape[0]
        parts.append(source[start : start + count])
        count -= parts[-1].shape[0]
        start += parts[-1].shape[0]
    if len(parts) > 1:
        parts = [torch.cat([part.view(BITS[part.element_size()]) for part in parts]).view(source.dtype)]
    return (parts[0] if parts else source[:0]).view(shape)


def make_values(case: Case) -> Values:
    rng = Random(case.seed)
    batch, keys = case.base.batch, max(case.longest, 1)

    def normal(dtype: torch.dtype, *shape: int) -> Tensor:
        return _stretch(_normals(dtype), rng.randrange(NORMALS), shape)

    kv_dtype, rows = DTYPES[case.kv_dtype], 1 if case.shared else batch
    q = normal(DTYPES[case.q_dtype], batch, case.queries, case.num_q_heads, case.head_dim)
    k = normal(kv_dtype, rows, keys, case.num_kv_heads, case.head_dim)
    v = k[..., : case.v_head_dim] if case.latent else normal(kv_dtype, rows, keys, case.num_kv_heads, case.v_head_dim)
    sinks = None
    if case.sinks is not None:
        sinks = normal(torch.float32, case.num_q_heads) * 2
        if case.sinks == "mixed":
            sinks[rng.randrange(case.num_q_heads)] = -torch.inf
            sinks[rng.randrange(case.num_q_heads)] = 30.0
    scales = [_scale(rng, kind, case.num_kv_heads) for kind in (case.k_scale, case.v_scale)]
    return Values(q, k, v, _make_mask(rng, case, keys), sinks, *scales)


def _scale(rng: Random, kind: str | None, heads: int) -> Tensor | float | None:
    def number() -> float:
        return rng.choice((-1, 1)) * rng.randint(1000, 8000) / 4096 if rng.random() < 0.95 else 0.0  # exact in f32

    if kind in (None, "number"):
        return None if kind is None else number()
    return torch.tensor([number() for _ in range(heads if kind == "head" else 1)], dtype=torch.float32)


def _make_mask(rng: Random, case: Case, keys: int) -> Tensor | None:
    if case.mask is None:
        return None
    full = (case.base.batch, case.num_q_heads, case.queries, keys)
    shape = tuple(size if real else 1 for size, real in zip(full, case.mask_dims, strict=True))
    share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    draws = _stretch(_random_bytes(), rng.randrange(NORMALS), shape)
    hidden = draws.to(torch.int16) < int(share * 256)
    if case.tree:
        lengths = torch.tensor([case.key_range(row)[1] for row in range(case.base.batch)])
        lengths = lengths[:, None, None, None] if case.mask_dims[0] else lengths.max()
        hidden &= torch.arange(shape[3]) >= lengths - case.queries
    if case.mask == "bool":
        return ~hidden
    bias = _stretch(_normals(DTYPES[case.mask]), rng.randrange(NORMALS), shape)
    return bias.masked_fill(hidden, rng.choice(HIDDEN))


# ---- a call ------------------------------------------------------------------------------------------------


class Call:
    """The tensors of one call, in an arena of their own on `device`.

    rows: which rows of the values these are. `arguments` are decode_attention's. `reserve` hands out the places kept
    for out, lse and workspace. `before` is the arena as it was, on the CPU; `inputs_before` on the device, as far as
    nothing may be written. On a GPU nothing here waits for it: with many processes on one GPU, waiting is what takes
    time.
    """

    def __init__(
        self, case: Case, values: Values, geometry: Geometry, rows: tuple[int, ...], workspace_bytes: int, device: str
    ) -> None:
        self.geometry = geometry
        self.layouts = layouts(case, geometry)
        self.layouts["workspace"] = Layout(torch.uint8, (workspace_bytes,), (1,))
        self.places = self._place(case)
        host = torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
        self._poison(host, case)
        _fill(case, values, geometry, rows, {name: self._bits(host, name) for name in self.layouts})
        self.before = host
        self.arena = host.clone() if device == "cpu" else host.to(device, non_blocking=True)
        inputs = slice(self.written_from)
        self.inputs_before = host[inputs] if device == "cpu" else self.arena[inputs].clone()
        self.arguments = self._arguments(case, values, rows)
        self.free = [
            name for name in ("out", "lse", "workspace") if name not in self.arguments and name in self.layouts
        ]

    def _place(self, case: Case) -> dict[str, int]:
        """Byte of each tensor's first element; what may be written comes last, from `written_from` on."""
        places: dict[str, int] = {}
        end = BAND_BYTES
        k_start = 0
        for name, layout in self.layouts.items():
            if name == "out":
                self.written_from = end = -(-end // 256) * 256
            if name == "v_cache" and (case.latent or self.geometry.order == "interleaved"):
                places[name] = k_start + layout.start_bytes
                end = max(end, places[name] + layout.span_bytes + BAND_BYTES)
                continue
            end = -(-end // 256) * 256
            k_start = end if name == "k_cache" else k_start
            places[name] = end + layout.start_bytes
            end = places[name] + layout.span_bytes + BAND_BYTES
        self.size_bytes = -(-end // 256) * 256
        return places

    def _poison(self, host: Tensor, case: Case) -> None:
        if self.geometry.fill == "bytes":
            host.copy_(_stretch(_random_bytes(), case.seed, (self.size_bytes,)))
            return
        one = torch.tensor([POISON[self.geometry.fill]]).to(DTYPES[case.kv_dtype])  # fill_ refuses what fp8 has not
        bits = BITS[one.itemsize]
        host.view(bits).fill_(int(one.view(bits)))

    def view(self, arena: Tensor, name: str) -> Tensor:
        """The tensor of that name in an arena of this call's layout."""
        return self._view(arena, name, self.layouts[name].dtype)

    def _bits(self, arena: Tensor, name: str) -> Tensor:
        """The same as integers, which can be indexed whatever the dtype."""
        return self._view(arena, name, BITS[self.layouts[name].dtype.itemsize])

    def _view(self, arena: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        layout = self.layouts[name]
        return arena.view(dtype).as_strided(layout.sizes, layout.strides, self.places[name] // dtype.itemsize)

    def _arguments(self, case: Case, values: Values, rows: tuple[int, ...]) -> dict[str, Any]:
        given = [name for name in self.layouts if name not in ("out", "lse", "workspace")]
        given += ["out"] * self.geometry.own_out + ["workspace"] * self.geometry.own_workspace
        arguments: dict[str, Any] = {name: self.view(self.arena, name) for name in given}
        if "mask" in arguments and case.seed % 2:
            while arguments["mask"].ndim > 1 and arguments["mask"].shape[0] == 1:
                arguments["mask"] = arguments["mask"][0]
        if self.geometry.lens == "int":
            arguments["seq_lens"] = case.key_range(rows[0])[1]
        for name, kind, value in (("k_scale", case.k_scale, values.k_scale), ("v_scale", case.v_scale, values.v_scale)):
            if kind == "number":
                arguments[name] = value
        arguments |= dict(
            softmax_scale=case.softmax_scale,
            window=case.window,
            softcap=case.softcap,
            policy=case.policy,
            return_lse=case.return_lse,
        )
        return arguments

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """The guarded place for an output or scratch of this shape, if one is free."""
        for name in self.free:
            layout = self.layouts[name]
            if layout.sizes == shape and layout.dtype == dtype:
                self.free.remove(name)
                return self.view(self.arena, name)
        return None


def _fill(case: Case, values: Values, geometry: Geometry, rows: tuple[int, ...], bits: dict[str, Tensor]) -> None:
    """Write the values of these rows to where the views say."""
    index = torch.tensor(rows)
    q = values.q[index]
    bits["q"].copy_((q if case.q_len else q[:, 0]).view(bits["q"].dtype))
    # A second call may have another capacity, where a length over the first's would mean other keys.
    lengths = case.lengths if geometry is case.base else [case.key_range(row)[1] for row in range(case.base.batch)]
    for name, numbers in (("seq_lens", lengths), ("starts", case.starts or ())):
        if name in bits:
            bits[name].copy_(torch.tensor([numbers[row] for row in rows]))
    for name, tensor in (("sinks", values.sinks), ("k_scale", values.k_scale), ("v_scale", values.v_scale)):
        if name in bits and isinstance(tensor, Tensor):
            bits[name].copy_(tensor.view(torch.int32).view(bits[name].shape))
    if values.mask is not None:
        mask = values.mask[index] if values.mask.shape[0] > 1 else values.mask
        keys = min(bits["mask"].shape[3], mask.shape[3])
        bits["mask"][..., :keys].copy_(mask[..., :keys].view(bits["mask"].dtype))
    _fill_caches(case, values, geometry, rows, bits)


def _fill_caches(
    case: Case, values: Values, geometry: Geometry, rows: tuple[int, ...], bits: dict[str, Tensor]
) -> None:
    ranges = [case.key_range(row) for row in rows]
    if case.shared:  # all rows read one set of keys: write it once, for all of them
        used = [(first, end) for first, end in ranges if first < end] or [(0, 0)]
        ranges = [(min(first for first, _ in used), max(end for _, end in used))] * len(rows)
    blocks = torch.arange(len(rows))[:, None]
    page_size = geometry.page_size or max(geometry.capacity, 1)
    if geometry.page_size is not None:
        blocks = _make_table(case, geometry, rows, ranges, bits["k_cache"].shape[0])
        bits["block_table"].copy_(blocks)
        for row, column, page in case.absent:
            for i in (i for i, other in enumerate(rows) if other == row):
                bits["block_table"][i, column] = page
    written = range(1 if case.shared else len(rows))
    at = torch.cat([torch.full((max(ranges[i][1] - ranges[i][0], 0),), i) for i in written])
    keys = torch.cat([torch.arange(*ranges[i]) for i in written])
    if not len(keys):
        return
    block, slot = blocks[at, keys // page_size].long(), keys % page_size
    source = torch.zeros_like(at) if case.shared else torch.tensor(rows)[at]
    for name, tensor in (("k_cache", values.k), ("v_cache", values.v)):
        if name == "k_cache" or not case.latent:
            target = bits[name][:1] if case.shared and geometry.page_size is None else bits[name]
            target[block, slot] = tensor.view(target.dtype)[source, keys]


def _make_table(
    case: Case, geometry: Geometry, rows: tuple[int, ...], ranges: list[tuple[int, int]], num_pages: int
) -> Tensor:
    """int32 [rows, columns]: pages in random order where keys are needed, garbage everywhere else."""
    generator = torch.Generator().manual_seed(case.seed + len(rows) + geometry.capacity)
    shape = (len(rows), geometry.columns)
    table = torch.tensor(GARBAGE_PAGES)[torch.randint(len(GARBAGE_PAGES), shape, generator=generator)]
    order = torch.randperm(num_pages, generator=generator)
    page_size, taken = geometry.page_size or 1, 0
    for i, (first, end) in enumerate(ranges):
        needed = _columns(first, end, page_size)
        columns = slice(needed.start, needed.stop)
        if case.shared and i:
            table[i, columns] = table[0, columns]
        else:
            table[i, columns] = order[taken : taken + len(needed)]
            taken += len(needed)
    return table.to(torch.int32)
