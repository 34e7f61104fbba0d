"""A case as plain data: everything that a failing call needs to be made again, and nothing that a machine decides."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from ...problem import DecodeProblem


@dataclass(frozen=True)
class Geometry:
    """How the tensors of one call lie in memory. None of it may change a byte of the answer.

    capacity: keys a row may hold (for pages: columns of the table x page_size). order: of the caches' dimensions in
    memory, "nhd", "hnd" or "interleaved" (K and V of a page side by side in one pool). pads: elements between heads,
    between keys and between rows or pages, beyond what is needed. offset: elements by which tensors start past an
    aligned address. rest_pad: the same for q, out, mask and table rows. mask_order: "nhd" or "transposed".
    lens: how lengths are passed: "int32", "int64" or "int". fill: the poison in all other bytes. own_out,
    own_workspace: whether the caller gives them.
    """

    batch: int
    capacity: int
    page_size: int | None = None
    order: str = "nhd"
    pads: tuple[int, int, int] = (0, 0, 0)
    offset: int = 0
    rest_pad: int = 0
    mask_order: str = "nhd"
    lens: str = "int32"
    fill: str = "nan"
    own_out: bool = False
    own_workspace: bool = False

    @property
    def columns(self) -> int:
        """Pages per row, as the table has them."""
        return 0 if self.page_size is None else self.capacity // self.page_size


@dataclass(frozen=True)
class Case:
    """One problem: what is asked (all fields but the last three), and two memory layouts to ask it in.

    q_len 0: q without that dimension. sinks: "normal", "mixed" (some -inf, some large) or None. starts: first visible
    key per row. mask: its dtype or None; mask_dims: which of batch, heads, queries, keys it really has; tree: hide
    only among the last q_len keys. k_scale, v_scale: "number", "0-d", "one", "head" or None. latent: V is the first
    columns of K. shared: all rows hold the same keys. absent: (row, column, page id) of pages that do not exist.
    lengths may be negative or over the capacity. twin: the second call, whose row i is row twin_rows[i] of the first.
    """

    seed: int
    q_dtype: str
    kv_dtype: str
    num_kv_heads: int
    group_size: int
    head_dim: int
    v_head_dim: int
    q_len: int
    lengths: tuple[int, ...]
    policy: str = "auto"
    return_lse: bool = True
    softmax_scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: str | None = None
    starts: tuple[int, ...] | None = None
    mask: str | None = None
    mask_dims: tuple[bool, bool, bool, bool] = (True, True, True, True)
    tree: bool = False
    k_scale: str | None = None
    v_scale: str | None = None
    latent: bool = False
    shared: bool = False
    absent: tuple[tuple[int, int, int], ...] = ()
    base: Geometry = field(default_factory=lambda: Geometry(1, 1))
    twin: Geometry | None = None
    twin_rows: tuple[int, ...] = ()

    @property
    def queries(self) -> int:
        return max(self.q_len, 1)

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    def problem(self, geometry: Geometry) -> DecodeProblem:
        return DecodeProblem(
            batch=geometry.batch,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            q_len=self.queries,
            capacity=geometry.capacity,
            q_dtype=self.q_dtype,
            kv_dtype=self.kv_dtype,
            page_size=geometry.page_size,
        )

    def key_range(self, row: int) -> tuple[int, int]:
        """[first, end) of the keys that any query of a row may see; first <= end."""
        end = min(max(self.lengths[row], 0), self.base.capacity)
        first = 0 if self.starts is None else max(self.starts[row], 0)
        if self.window:
            first = max(first, end - self.queries + 1 - self.window)
        return min(first, end), end

    @property
    def longest(self) -> int:
        """Keys of the longest row."""
        return max(self.key_range(row)[1] for row in range(self.base.batch))

    def features(self) -> list[str]:
        """What a run counts its cases by."""
        geometry = self.base
        named = {
            "paged": geometry.page_size is not None,
            "contiguous": geometry.page_size is None,
            "several queries": self.queries > 1,
            "window": bool(self.window),
            "softcap": bool(self.softcap),
            "sinks": self.sinks is not None,
            "starts": self.starts is not None,
            "bool mask": self.mask == "bool",
            "additive mask": self.mask not in (None, "bool"),
            "tree mask": self.mask is not None and self.tree,
            "scales": self.k_scale is not None or self.v_scale is not None,
            "latent V": self.latent,
            "shared keys": self.shared,
            "absent pages": bool(self.absent),
            "V head size of its own": self.v_head_dim != self.head_dim,
            "odd strides": geometry.offset % 16 != 0 or any(pad % 16 for pad in geometry.pads),
            "heads before keys": geometry.order == "hnd",
            "interleaved pool": geometry.order == "interleaved",
            "empty row": any(first == end for first, end in map(self.key_range, range(geometry.batch))),
            "length over capacity": any(length > geometry.capacity for length in self.lengths),
            "negative length": any(length < 0 for length in self.lengths),
            "second layout": self.twin is not None,
            f"lengths as {geometry.lens}": True,
            f"poison {geometry.fill}": True,
            f"policy {self.policy.partition('(')[0]}": True,
            "out given": geometry.own_out,
            "workspace given": geometry.own_workspace,
            "lse": self.return_lse,
        }
        return [name for name, holds in named.items() if holds]

    def to_json(self) -> str:
        """One line; what has its default is left out."""
        return json.dumps(_differing(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Case:
        """Raises ValueError for what is no case."""
        try:
            data = json.loads(text)
            for name in ("base", "twin"):
                if data.get(name) is not None:
                    data[name] = Geometry(**_tuples(data[name]))
            case = Case(**_tuples(data))
            case.problem(case.base)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"case: expected the JSON object that a failure prints, got {text[:80]!r}: {error}"
            ) from None
        if len(case.lengths) != case.base.batch:
            raise ValueError(f"case: expected {case.base.batch} lengths, one per row, got {len(case.lengths)}")
        return case


def _differing(value: Case | Geometry) -> dict[str, Any]:
    required = {"batch", "capacity"} if isinstance(value, Geometry) else set()
    plain = Geometry(0, 0) if isinstance(value, Geometry) else Case(0, "", "", 0, 0, 0, 0, -1, ())
    found = {}
    for entry in fields(value):
        mine = getattr(value, entry.name)
        if mine != getattr(plain, entry.name) or entry.name in required or entry.name == "seed":
            found[entry.name] = _differing(mine) if isinstance(mine, Geometry) else mine
    return found


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples that frozen dataclasses hold."""

    def convert(item: Any) -> Any:
        return tuple(map(convert, item)) if isinstance(item, list) else item

    return {name: convert(item) for name, item in value.items()}
