"""The smallest case that still fails: options are dropped one by one and sizes halved, as long as it fails alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from ...policy import ceil_div
from .cases import Case, Geometry

_OPTIONS = (
    "window", "softcap", "sinks", "starts", "mask", "k_scale", "v_scale", "softmax_scale", "absent", "tree", "latent",
    "shared", "policy", "mask_dims",
)  # fmt: skip


def kinds(failures: list[str]) -> set[str]:
    """What went wrong, without the numbers: a smaller case must go wrong in one of the same ways."""
    return {":".join(text.split(":")[: 2 if " call:" in text else 1]) for text in failures}


def shrink(case: Case, failures: list[str], run: Callable[[Case], list[str]], seconds: float) -> Case:
    """`run` gives the failures of a case; the result fails in one of the ways that `failures` name.

    Ends where no step keeps the failure, or after `seconds`: on a GPU each try may compile a kernel.
    """
    wanted, deadline, again = kinds(failures), time.monotonic() + seconds, True
    while again:
        again = False
        for smaller in _smaller(case):
            if time.monotonic() > deadline:
                return case
            if kinds(run(smaller)) & wanted:
                case, again = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases a step simpler than this one, the boldest steps first."""
    if case.twin is not None:
        yield replace(case, twin=None, twin_rows=())
        if case.twin.batch > 1:
            for row in {case.twin_rows[0], case.twin_rows[-1]}:
                yield replace(case, twin=replace(case.twin, batch=1), twin_rows=(row,))
    for row in range(case.base.batch if case.base.batch > 1 else 0):
        yield _only_row(case, row)
    plain = Case(0, "", "", 0, 0, 0, 0, 0, ())
    for name in _OPTIONS:
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    if case.q_len:
        yield replace(case, q_len=0)
        yield from (replace(case, q_len=case.q_len // 2) for _ in range(case.q_len > 1))
    for name in ("num_kv_heads", "group_size"):
        for value in sorted({1, getattr(case, name) // 2} - {0, getattr(case, name)}):
            yield replace(case, **{name: value})
    for name in ("head_dim", "v_head_dim"):
        for value in sorted({16, getattr(case, name) // 32 * 16} - {0, getattr(case, name)}):
            if not (case.latent and name == "head_dim" and value < case.v_head_dim):
                yield replace(case, **{name: value})
    yield from _shorter(case)
    if case.window:
        yield from (replace(case, window=value) for value in (1, case.window // 2) if 0 < value < case.window)
    for which in ("base", "twin"):
        geometry = getattr(case, which)
        if geometry is not None:
            for plainer in _plainer(geometry, bool(case.absent)):
                changed: dict[str, Any] = {which: plainer}
                yield replace(case, **changed)


def _only_row(case: Case, row: int) -> Case:
    """The case with this row alone."""
    twin, rows = case.twin, tuple(0 for other in case.twin_rows if other == row)
    if twin is not None:
        twin = replace(twin, batch=len(rows)) if rows else None
    return replace(
        case,
        lengths=(case.lengths[row],),
        starts=case.starts and (case.starts[row],),
        absent=tuple((0, column, page) for at, column, page in case.absent if at == row),
        base=replace(case.base, batch=1),
        twin=twin,
        twin_rows=rows,
    )


def _shorter(case: Case) -> Iterator[Case]:
    """Fewer keys, then no more capacity than they need."""
    if case.longest > 1 and not case.absent:
        for change in (lambda n: n // 2, lambda n: n - 1):
            lengths = tuple(change(max(min(length, case.base.capacity), 1)) for length in case.lengths)
            if max(lengths) > 0:
                yield replace(case, lengths=lengths, starts=case.starts and tuple(start // 2 for start in case.starts))
    for which in ("base", "twin"):
        geometry = getattr(case, which)
        if geometry is not None:
            unit = geometry.page_size or 1
            needed = max(ceil_div(case.longest, unit), 1) * unit
            if needed < geometry.capacity:
                yield replace(case, **{which: replace(geometry, capacity=needed)})


def _plainer(geometry: Geometry, paged: bool) -> Iterator[Geometry]:
    plain = Geometry(geometry.batch, geometry.capacity)
    for entry in fields(geometry):
        if getattr(geometry, entry.name) != getattr(plain, entry.name) and not (paged and entry.name == "page_size"):
            yield replace(geometry, **{entry.name: getattr(plain, entry.name)})
