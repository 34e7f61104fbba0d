"""Which cases there are: case `index` of a run follows from (seed, index) alone, on any machine.

A GPU kernel is compiled for its dtypes, sizes, flags, and for which strides are multiples of 16, a second or more
each time. So with `pool` there are that many *shapes*, index % pool names one, and its geometries are held to one
set of such classes; lengths, values, pages, poison and numbers stay free. Without a pool every case has its own shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

from ...plan import plan_decode
from ...policy import SplitPolicy, ceil_div
from ...problem import DTYPE_BYTES, DeviceSpec
from ...tiles import power_of_two
from .cases import Case, Geometry
from .tensors import layouts

DTYPES = {  # (q, KV): weight
    ("f32", "f32"): 22,
    ("f16", "f16"): 12,
    ("bf16", "bf16"): 18,
    ("bf16", "fp8_e4m3"): 9,
    ("f16", "fp8_e4m3"): 5,
    ("bf16", "fp8_e5m2"): 6,
    ("f16", "fp8_e5m2"): 4,
    ("f32", "fp8_e4m3"): 3,
    ("f32", "fp8_e5m2"): 3,
    ("f32", "f16"): 4,
    ("f32", "bf16"): 4,
    ("bf16", "f32"): 3,
    ("f16", "f32"): 2,
    ("bf16", "f16"): 3,
    ("f16", "bf16"): 2,
}
# Head sizes; 0 stands for any multiple of 16.
HEAD_DIMS = {
    64: 20,
    128: 22,
    16: 12,
    32: 10,
    256: 8,
    96: 4,
    80: 3,
    48: 3,
    112: 3,
    192: 3,
    0: 12,
}
GROUPS = {1: 15, 2: 12, 3: 7, 4: 18, 5: 5, 6: 7, 7: 6, 8: 12, 12: 4, 16: 6, 32: 3, 64: 2, 9: 1, 24: 2}
KV_HEADS = {1: 20, 2: 40, 3: 8, 4: 20, 5: 3, 8: 9}
PAGE_SIZES = {1: 6, 16: 30, 64: 14, 128: 10, 256: 6, 528: 5, 784: 5, 1056: 5, 3: 4, 17: 4, 32: 8, 100: 3}
BATCHES = {1: 25, 2: 25, 3: 20, 4: 15, 6: 5, 8: 5, 17: 2, 40: 2}
MASKS = {None: 64, "bool": 16, "f32": 8, "f16": 5, "bf16": 7}
SCALES = {None: 3, "number": 3, "0-d": 2, "one": 1, "head": 4}
FILLS = {"nan": 5, "inf": 2, "-inf": 1, "6e4": 2, "bytes": 3, "zero": 1}
LENS = {"int32": 6, "int64": 2, "int": 2}
ORDERS = {"nhd": 5, "hnd": 3, "interleaved": 3}
HUGE = 2**31 - 1
PAGE_BYTES = 1 << 20
"""Most bytes of K and V in one page: pools of a few rows then stay small."""
POOL_TRIALS = 32
ROOMY = (20_000, 65_536, 262_144)
"""Capacities of tables far wider than their rows: the plan then cuts finely, and most blocks find nothing to do."""
ROOMY_COLUMNS = 1 << 18
CROWD = (1, 200, 300)
"""Rows of a crowd, which share their keys: enough for blocks that join several splits, at the cost of one row."""

Weights = dict[Any, int]


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for: the fields of a case that must not vary within a pool's member."""

    case: Case
    page_sizes: tuple[int | None, int | None]
    lens: tuple[str, str]
    odd: bool
    crowd: bool


def draw_case(seed: int, index: int, pool: int | None = None) -> Case:
    """Case `index` of the run with this seed."""
    rng = Random(f"{seed}/{index}")
    if pool is None:
        shape = _draw_shape(rng)
        base = _draw_geometry(rng, shape, 0)
        twins: tuple[Geometry, ...] = ()
    else:
        shape, bases, twins = _pooled(seed, index % pool)
        base = _free_fields(rng, rng.choice(bases))
    case = _draw_values(rng, replace(shape.case, base=base))
    if rng.random() < 0.1:
        return case
    if not _any_layout(case):
        twin = _same_problem(rng, shape, base, pool is not None)
        return replace(case, twin=twin, twin_rows=tuple(rng.sample(range(base.batch), base.batch)))
    if pool is None:
        kept = bool(case.absent) or rng.random() < 0.3
        twin = _draw_geometry(rng, shape, 1, need=case.longest, page_size=base.page_size if kept else -1)
    else:
        wide = [one for one in twins if one.capacity >= case.longest]
        if case.absent:
            wide = [one for one in wide if one.page_size == base.page_size]
        if not wide:
            return case
        twin = _free_fields(rng, rng.choice(wide))
    rows = [rng.randrange(base.batch)] if twin.lens == "int" else range(base.batch)
    return replace(case, twin=twin, twin_rows=tuple(rng.choices(rows, k=twin.batch)))


def _any_layout(case: Case) -> bool:
    """Whether the policy's bytes ignore batch and capacity: those of auto and pinned must, and others say so."""
    policy = _policy(case)
    return policy.batch_invariant and policy.kind != "capacity"


def _policy(case: Case) -> SplitPolicy:
    return SplitPolicy.parse(case.policy) or SplitPolicy.auto()


def _pick(rng: Random, weights: Weights) -> Any:
    return rng.choices(list(weights), list(weights.values()))[0]


# ---- shapes ------------------------------------------------------------------------------------------------


def _draw_shape(rng: Random) -> Shape:
    q_dtype, kv_dtype = _pick(rng, DTYPES)
    head_dim, v_head_dim = _draw_dims(rng)
    num_kv_heads, group_size = _pick(rng, KV_HEADS), _pick(rng, GROUPS)
    while num_kv_heads * group_size > 64 and num_kv_heads > 1:
        num_kv_heads -= 1
    q_len = rng.choices([0, 1, rng.randint(2, 4), rng.randint(5, 16)], [45, 10, 28, 17])[0]
    crowd = rng.random() < 0.015
    if crowd:
        num_kv_heads, group_size, q_len = rng.randint(1, 2), rng.randint(1, 2), min(q_len, 2)
        head_dim, v_head_dim = min(head_dim, 64), min(v_head_dim, 64)
    mask = _pick(rng, MASKS)
    scaled = kv_dtype.startswith("fp8") or rng.random() < 0.2
    case = Case(
        seed=0,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q_len=q_len,
        lengths=(),
        policy="auto" if crowd and rng.random() < 0.8 else _draw_policy(rng),
        return_lse=rng.random() < 0.9,
        window=1 if rng.random() < 0.3 else None,  # the numbers come with the case
        softcap=1.0 if rng.random() < 0.2 else None,
        sinks="normal" if rng.random() < 0.25 else None,
        starts=() if rng.random() < 0.25 else None,
        mask=mask,
        mask_dims=tuple(rng.random() < share for share in (0.7, 0.5, 0.8, 0.93)),  # type: ignore[arg-type]
        k_scale=_pick(rng, SCALES) if scaled else None,
        v_scale=_pick(rng, SCALES) if scaled else None,
        shared=crowd,
        latent=v_head_dim <= head_dim and rng.random() < (0.5 if head_dim == 576 else 0.06),
    )
    in_f32 = "f32" in (q_dtype, kv_dtype) or (q_dtype != kv_dtype and not kv_dtype.startswith("fp8"))
    pages = (_draw_page_size(rng, case), _draw_page_size(rng, case))
    if rng.random() < 0.3:
        pages = (pages[0], pages[0])
    lens = (_pick(rng, LENS), _pick(rng, LENS))
    return Shape(case, pages, lens, odd=rng.random() < (0.08 if in_f32 else 0.3), crowd=crowd)


def _draw_dims(rng: Random) -> tuple[int, int]:
    kind = rng.random()
    if kind < 0.01:
        return 576, 512
    if kind < 0.04:
        return 192, 128
    head_dim = _pick(rng, HEAD_DIMS) or 16 * rng.randint(1, 16)
    return head_dim, head_dim if rng.random() < 0.75 else 16 * rng.randint(1, 16)


def _draw_policy(rng: Random) -> str:
    if rng.random() < 0.55:
        return "auto"
    many = f"pinned({rng.choice((1, 2, 3, 4, 5, 7, 8, 16, 17, 30, 64, 65, 129))})"
    length = f"length({rng.choice((3, 16, 65, 256))},{rng.choice((1, 7, 16, 64))})"
    others = ("off", "waves", "capacity", f"capacity({rng.randint(32, 300)})", "length", length, "legacy", "legacy(40)")
    return rng.choice((many, many, many, *others))


def _draw_page_size(rng: Random, case: Case) -> int | None:
    if rng.random() < 0.4:
        return None
    page_size: int = _pick(rng, PAGE_SIZES)
    while page_size * _bytes_per_key(case) > PAGE_BYTES:
        page_size = max(page_size // 2, 1)
    return page_size


def _bytes_per_key(case: Case) -> int:
    return case.num_kv_heads * (case.head_dim + case.v_head_dim) * DTYPE_BYTES[case.kv_dtype]


# ---- geometries --------------------------------------------------------------------------------------------


def _draw_geometry(rng: Random, shape: Shape, which: int, need: int = 0, page_size: int | None = -1) -> Geometry:
    """Memory for rows of at least `need` keys. page_size -1: the shape's own for the first or second call."""
    case = shape.case
    page_size = shape.page_sizes[which] if page_size == -1 else page_size
    large = rng.random() < 0.02
    most = _most_keys(case, large)
    longest = rng.choice((rng.randint(1, 32), rng.randint(20, 130), rng.randint(100, 700), rng.randint(100, 700)))
    longest = rng.randint(1000, 6000) if large or rng.random() < 0.02 else longest
    longest = max(min(longest, most), need)
    batch = max(min(_pick(rng, BATCHES), most // max(longest, page_size or 1)), 1)
    if shape.crowd:
        batch, longest = rng.choice(CROWD), max(rng.randint(600, 1400), need)
    capacity = longest + rng.choice((0, 0, 1, rng.randint(0, 16), longest // 2))
    if need == 0 and rng.random() < 0.005:
        capacity = 0
    masked = case.mask is not None and case.mask_dims[3]
    if page_size is not None and not masked and rng.random() < 0.12:
        wide = min(rng.choice(ROOMY), ROOMY_COLUMNS // batch * page_size)
        capacity = max(capacity, wide) if wide >= ROOMY[0] else capacity
    if page_size is not None:
        capacity = ceil_div(capacity, page_size) * page_size
    pads = (0, 1, 3, 7, 16, 40) if shape.odd else (0, 0, 0, 16, 32)
    order = _pick(rng, ORDERS)
    if case.latent and order == "interleaved":
        order = "nhd"
    return _free_fields(
        rng,
        Geometry(
            batch=batch,
            capacity=capacity,
            page_size=page_size,
            order=order,
            pads=(rng.choice(pads), rng.choice(pads), rng.choice(pads)),
            offset=rng.choice((0, 1, 3, 7, 16)) if shape.odd else rng.choice((0, 0, 16)),
            rest_pad=rng.choice(pads),
            mask_order=rng.choice(("nhd", "nhd", "transposed")),
            lens=shape.lens[which],
            own_out=rng.random() < 0.4,
        ),
    )


def _most_keys(case: Case, large: bool) -> int:
    """Keys of all rows together that keep a case quick: by multiply-adds, and by bytes."""
    work = (150e6 if large else 20e6) / (case.num_q_heads * case.queries * (case.head_dim + case.v_head_dim))
    return int(max(min(work, (24e6 if large else 3e6) / _bytes_per_key(case)), 40))


def _free_fields(rng: Random, geometry: Geometry) -> Geometry:
    """What costs no compilation, drawn for each case."""
    return replace(geometry, fill=_pick(rng, FILLS), own_workspace=rng.random() < 0.4)


def _same_problem(rng: Random, shape: Shape, base: Geometry, pooled: bool) -> Geometry:
    """Another place for the same problem: policies that read batch or capacity promise no more."""
    other = base if pooled else replace(_draw_geometry(rng, shape, 1, page_size=base.page_size), lens=base.lens)
    return _free_fields(rng, replace(other, batch=base.batch, capacity=base.capacity, page_size=base.page_size))


@lru_cache(maxsize=64)
def _pooled(seed: int, member: int) -> tuple[Shape, tuple[Geometry, ...], tuple[Geometry, ...]]:
    """A shape of the pool, and geometries for first and second calls that need no further compilation."""
    rng = Random(f"{seed}/shape/{member}")
    shape = _draw_shape(rng)
    bases = _one_class(rng, shape.case, [_draw_geometry(rng, shape, 0) for _ in range(POOL_TRIALS)])
    most = max(base.capacity for base in bases)
    drawn = [_draw_geometry(rng, shape, 1, need=rng.choice((0, most))) for _ in range(POOL_TRIALS)]
    return shape, bases, _one_class(rng, shape.case, drawn)


def _one_class(rng: Random, case: Case, drawn: list[Geometry]) -> tuple[Geometry, ...]:
    classes = [_launch_class(case, geometry) for geometry in drawn]
    chosen = rng.choice(classes)
    return tuple(one for one, its in zip(drawn, classes, strict=True) if its == chosen)


def _launch_class(case: Case, geometry: Geometry) -> tuple[object, ...]:
    """What each GPU backend compiles anew for. Triton: integers by whether they are 1 or multiples of 16, addresses of
    16 bytes, and the plan's constants; cuda: whether rows of K and V load in 16 bytes, and the plan's constants."""
    none = (0,) * geometry.batch
    case = replace(case, base=geometry, lengths=none, starts=None if case.starts is None else none)
    found: list[object] = []
    for name, tensor in layouts(case, geometry).items():
        strides = [step if size > 1 else 0 for size, step in zip(tensor.sizes, tensor.strides, strict=True)]
        found += [name, tensor.start_bytes % 16 == 0, *((n == 1, n % 16 == 0) for n in strides)]
        if name in ("k_cache", "v_cache"):
            found.append(all(n * DTYPE_BYTES[case.kv_dtype] % 16 == 0 for n in strides[:-1]))
    lse = (case.num_q_heads * case.queries if geometry.batch > 1 else 0, case.num_q_heads if case.queries > 1 else 0)
    found += [(n == 1, n % 16 == 0) for n in lse]
    for backend in ("triton", "cuda"):  # not auto, which reads the environment
        try:
            plan = plan_decode(case.problem(geometry), DeviceSpec.named("h200"), _policy(case), backend)
        except ValueError:  # not taken, whatever the layout
            continue
        parts = next((limit for limit in (4, 16) if plan.max_splits <= limit), 64)
        rows = power_of_two(geometry.batch) if plan.max_run > 1 else 1
        found += [plan.max_run, plan.splits and parts, rows]
    return tuple(found)


# ---- values ------------------------------------------------------------------------------------------------


def _draw_values(rng: Random, case: Case) -> Case:
    base = case.base
    shared = case.shared or rng.random() < 0.06
    case = replace(case, seed=rng.randrange(2**31), lengths=_draw_lengths(rng, case), shared=shared)
    longest = max(min(max(case.lengths), base.capacity), 1)
    root = case.head_dim**-0.5
    case = replace(
        case,
        softmax_scale=rng.choice((None, None, None, root, 0.5 * root, 2 * root, 8 * root, -root, 0.0)),
        tree=case.mask is not None and case.mask_dims[3] and rng.random() < 0.3,
    )
    if case.window is not None:
        near = max((base.page_size or 64) + rng.randint(-1, 1), 1)
        window = rng.choice((1, rng.randint(1, 20), near, rng.randint(1, longest), longest, 2**40, 0))
        case = replace(case, window=window)
    if case.softcap is not None:
        case = replace(case, softcap=rng.choice((0.5, 5.0, 20.0, 50.0)))
    if case.sinks is not None:
        case = replace(case, sinks=rng.choice(("normal", "normal", "mixed")))
    if case.starts is not None:
        anywhere = [rng.choice((0, 0, rng.randint(0, longest), rng.randint(0, longest // 4))) for _ in case.lengths]
        odd = [rng.choice((-1, -(2**31), HUGE, longest)) if rng.random() < 0.05 else start for start in anywhere]
        case = replace(case, starts=tuple(odd))
    if base.page_size is not None and rng.random() < 0.12:
        case = replace(case, absent=_draw_absent(rng, case))
    return case


def _draw_lengths(rng: Random, case: Case) -> tuple[int, ...]:
    base, huge = case.base, 2**40 if case.base.lens == "int64" else HUGE
    roomy = base.capacity >= ROOMY[0]
    room = _most_keys(case, large=False) // (1 if case.shared else base.batch)
    most = min(base.capacity, max(room, 8), 1400) if roomy else base.capacity

    def inside() -> int:
        near = 64 * rng.randint(0, most // 64) + rng.randint(-1, 1)
        small, anywhere = rng.randint(1, 20), rng.randint(0, most)
        wanted = rng.choices((0, most, near, small, anywhere), (5, 12, 20, 13, 50))[0]
        return min(max(wanted, 0), most)

    if base.lens == "int":
        return (inside(),) * base.batch
    hostile = (-1, -huge) if roomy else (base.capacity + rng.randint(1, 5), huge, -1, -huge)
    return tuple(rng.choice(hostile) if rng.random() < 0.04 else inside() for _ in range(base.batch))


def _draw_absent(rng: Random, case: Case) -> tuple[tuple[int, int, int], ...]:
    """Up to three needed pages that do not exist."""
    page_size = case.base.page_size or 1
    found = []
    for row in rng.sample(range(case.base.batch), min(case.base.batch, 3)):
        first, end = case.key_range(row)
        if first < end:
            column = rng.randint(first // page_size, (end - 1) // page_size)
            found.append((row, column, rng.choice((-1, -HUGE, HUGE, -2, 10**6, 2**30))))
    return tuple(found)
