"""The memo of checked calls: the same answers, the same refusals, and nothing kept that could be wrong next time.

A stand-in for a GPU backend prepares launches that see addresses alone: they rebuild the tensors from memory and run
the CPU backend. So what a repeated call gets wrong, its result shows.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from splitkv import DecodeAttention, SplitPolicy, attention, decode_attention, prepared
from splitkv.backends import TENSORS, cpu
from splitkv.checks import check_inputs
from splitkv.prepared import VARIABLES, CallMemo, environment

BATCH, CAPACITY, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 2, 64, 4, 2, 16, 16
PAGES = BATCH * CAPACITY // PAGE
LENS = (50, 7)


def tensor_at(address: int, like: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> Tensor:
    """The tensor of this shape, strides and dtype that begins at an address."""
    shape, strides, dtype = like
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class MemoryLaunch:
    """A prepared launch that keeps layouts, options and the plan, and is given addresses and a length."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.layouts = {n: (t.shape, t.stride(), t.dtype) for n, t in arguments.items() if isinstance(t, Tensor)}
        self.options = {name: value for name, value in arguments.items() if name not in self.layouts}
        self.variant: Hashable = tuple(sorted((name, layout[2]) for name, layout in self.layouts.items()))
        self.launches = 0

    def __call__(self, addresses: Sequence[int], uniform_len: int) -> None:
        given = dict(zip(TENSORS, addresses, strict=True))
        assert all(given[name] == 0 for name in TENSORS if name not in self.layouts)
        arguments = self.options | {name: tensor_at(given[name], like) for name, like in self.layouts.items()}
        if "seq_lens" not in self.layouts:
            arguments["seq_lens"] = uniform_len
        cpu.launch(**arguments)
        self.launches += 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[MemoryLaunch]:
    """The launches prepared so far, from an empty memo on."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    made: list[MemoryLaunch] = []

    def prepare(**arguments: Any) -> MemoryLaunch:
        made.append(MemoryLaunch(arguments))
        return made[-1]

    monkeypatch.setattr(prepared, "preparer", lambda name: prepare)
    monkeypatch.setattr(attention, "_CALLS", CallMemo())
    return made


def call(seed: int = 0, paged: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    outer = (PAGES, PAGE) if paged else (BATCH, CAPACITY)
    arguments: dict[str, Any] = dict(
        q=normal(BATCH, Q_HEADS, HEAD_DIM),
        k_cache=normal(*outer, KV_HEADS, HEAD_DIM),
        v_cache=normal(*outer, KV_HEADS, HEAD_DIM),
        seq_lens=torch.tensor(LENS, dtype=torch.int32) - seed,
    )
    if paged:
        order = torch.randperm(PAGES, generator=generator, dtype=torch.int32)
        arguments["block_table"] = order.view(BATCH, -1)
    return arguments | changes


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def workspace(seed: int) -> Tensor:
    return torch.full((1 << 16,), float(seed))


# What a caller may vary between two calls of one kind, by seed.
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda seed: call(seed),
    "half": lambda seed: call(seed, dtype=torch.float16),
    "paged": lambda seed: call(seed, paged=True),
    "one length for all": lambda seed: call(seed, seq_lens=40 + seed),
    "several queries": lambda seed: call(seed, q=torch.randn(BATCH, 3, Q_HEADS, HEAD_DIM)),
    "options": lambda seed: call(seed, softmax_scale=0.2, window=9, softcap=5.0, k_scale=0.5, v_scale=2),
    "sinks and starts": lambda seed: call(seed, sinks=torch.randn(Q_HEADS), starts=ints(seed + 1, 0)),
    "bool mask": lambda seed: call(seed, mask=torch.rand(BATCH, 1, 1, CAPACITY) < 0.7),
    "additive mask": lambda seed: call(seed, mask=torch.randn(Q_HEADS, 1, CAPACITY)),
    "scales": lambda seed: call(seed, k_scale=torch.rand(KV_HEADS), v_scale=torch.rand(())),
    "policy": lambda seed: call(seed, policy=SplitPolicy.pinned(3)),
    "workspace": lambda seed: call(seed, policy="pinned(4)", workspace=workspace(seed)),
    "out": lambda seed: call(seed, out=torch.full((BATCH, Q_HEADS, HEAD_DIM), torch.nan)),
    "lse": lambda seed: call(seed, return_lse=True, policy="2"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_call_is_prepared_once_and_gives_the_full_calls_answer(
    kind: str, launches: list[MemoryLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = [KINDS[kind](seed) for seed in range(4)]
    results = [decode_attention(**arguments) for arguments in tried]
    assert len(launches) == 1 and launches[0].launches == 4
    monkeypatch.setattr(prepared, "preparer", lambda name: lambda **_: None)
    for arguments, result in zip(tried, results, strict=True):
        if "out" in arguments:
            assert result is arguments["out"]
            arguments["out"] = None
        monkeypatch.setattr(attention, "_CALLS", CallMemo())
        want = decode_attention(**arguments)
        pairs = list(zip(result, want, strict=True)) if isinstance(want, tuple) else [(result, want)]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
        assert not any(tensor.isnan().any() for pair in pairs for tensor in pair)


def strided(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


def misaligned(tensor: Tensor) -> Tensor:
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor)


PLAIN = call()
OTHER_KINDS: dict[str, dict[str, Any]] = {
    **{f"strided {name}": {name: strided(PLAIN[name])} for name in ("q", "k_cache", "v_cache")},
    **{f"misaligned {name}": {name: misaligned(PLAIN[name])} for name in ("q", "k_cache", "v_cache", "seq_lens")},
    "longer": {name: PLAIN[name].repeat(1, 2, 1, 1) for name in ("k_cache", "v_cache")},
    "half": call(dtype=torch.float16),
    "long lengths": {"seq_lens": PLAIN["seq_lens"].long()},
    "one length": {"seq_lens": 7},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "scale": {"softmax_scale": 0.3},
    "integer scale": {"softmax_scale": 1},
    "k scale": {"k_scale": 0.5},
    "v scale": {"v_scale": 0.5},
    "sinks": {"sinks": torch.zeros(Q_HEADS)},
    "starts": {"starts": ints(1, 1)},
    "mask": {"mask": torch.ones(CAPACITY, dtype=torch.bool)},
    "additive mask": {"mask": torch.ones(CAPACITY)},
    "policy": {"policy": "pinned(3)"},
    "backend": {"backend": "cpu"},
    "out": {"out": torch.empty(BATCH, Q_HEADS, HEAD_DIM)},
    "strided out": {"out": strided(torch.empty(BATCH, Q_HEADS, HEAD_DIM))},
    "lse": {"return_lse": True},
    "workspace": {"workspace": workspace(0)},
}


@pytest.mark.parametrize("first", ["plain", *OTHER_KINDS])
def test_whatever_differs_is_another_kind(first: str, launches: list[MemoryLaunch]) -> None:
    """After a call of any kind, each other kind is prepared anew."""
    decode_attention(**PLAIN | OTHER_KINDS.get(first, {}))
    for name in ("plain", *OTHER_KINDS):
        if name != first:
            before = len(launches)
            decode_attention(**PLAIN | OTHER_KINDS.get(name, {}))
            assert len(launches) == before + 1, name
    assert len(attention._CALLS) == 1 + len(OTHER_KINDS)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_that_changes_is_read(
    variable: str, launches: list[MemoryLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"SPLITKV_POLICY": "pinned(3)", "SPLITKV_GQA_PACK": "0", "SPLITKV_BACKEND": "cpu", "SPLITKV_CHECK": "0"}
    decode_attention(**PLAIN)
    monkeypatch.setenv(variable, values.get(variable, "1"))
    decode_attention(**PLAIN)
    assert len(launches) == 2
    if variable in ("SPLITKV_POLICY", "SPLITKV_GQA_PACK"):
        assert launches[0].options["plan"] != launches[1].options["plan"]
    monkeypatch.delenv(variable)
    decode_attention(**PLAIN)
    assert len(launches) == 2 and launches[0].launches == 2


def test_variables_are_those_of_os_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(VARIABLES[:-1]):
        monkeypatch.setenv(name, f"value {number}")
    monkeypatch.delenv(VARIABLES[-1], raising=False)
    values = [None if value is None else os.fsdecode(value) for value in environment()]
    assert values == [os.environ.get(name) for name in VARIABLES] and values[-1] is None
    monkeypatch.setattr(os, "environ", {VARIABLES[0]: "plain dictionary"})
    assert environment() == ("plain dictionary", None, None, None, None)


def test_a_length_that_grows_never_misses(launches: list[MemoryLaunch]) -> None:
    for length in range(CAPACITY + 1):
        arguments = call(seq_lens=length)
        want = decode_attention(**call(seq_lens=torch.full((BATCH,), length, dtype=torch.int32)))
        assert torch.equal(decode_attention(**arguments), want)  # type: ignore[arg-type]
        numbered = decode_attention(**call(seq_lens=np.int64(length)))  # as good, and checked each time
        assert torch.equal(numbered, want)  # type: ignore[arg-type]
    assert len(attention._CALLS) == 2


# (what a good call has, what the bad one has in its place, the refusal)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"seq_lens": 5}, {"seq_lens": CAPACITY + 1}, ValueError, "seq_lens: expected 0..64 .*, got 65"),
    ({"seq_lens": 5}, {"seq_lens": -1}, ValueError, "seq_lens: expected 0..64 .*, got -1"),
    ({"seq_lens": 1}, {"seq_lens": True}, TypeError, "seq_lens: expected an int .*, got bool"),
    ({"seq_lens": 5}, {"seq_lens": 5.0}, TypeError, "seq_lens: .*got float"),
    ({"seq_lens": 5}, {"seq_lens": None}, TypeError, "seq_lens: .*got NoneType"),
    ({"window": 1}, {"window": True}, TypeError, "window: .*got bool"),
    ({"window": 5}, {"window": 5.0}, TypeError, "window: .*got float"),
    ({"softmax_scale": 1.0}, {"softmax_scale": True}, TypeError, "softmax_scale: .*got bool"),
    ({"softcap": 1.0}, {"softcap": True}, TypeError, "softcap: .*got bool"),
    ({"softcap": 1.0}, {"softcap": float("nan")}, ValueError, "softcap: .*got nan"),
    ({"k_scale": 1.0}, {"k_scale": True}, TypeError, "k_scale: .*got bool"),
    ({"v_scale": 1.0}, {"v_scale": [1.0]}, TypeError, "v_scale: .*got list"),
    ({"mask": torch.ones(64)}, {"mask": [1.0] * 64}, TypeError, "mask: .*got list"),
    ({}, {"q": None}, TypeError, "q: .*got NoneType"),
    ({}, {"v_cache": PLAIN["v_cache"].numpy()}, TypeError, "v_cache: .*got ndarray"),
    ({}, {"q": PLAIN["q"].to("meta")}, ValueError, "tensors: expected all on one device"),
    ({}, {"seq_lens": PLAIN["seq_lens"].to("meta")}, ValueError, "tensors: expected all on one device"),
    ({}, {"seq_lens": PLAIN["seq_lens"].float()}, TypeError, "seq_lens: expected dtype"),
    ({}, {"k_cache": PLAIN["k_cache"].half()}, TypeError, "v_cache: expected k_cache's dtype"),
    (
        {},
        {"k_cache": PLAIN["k_cache"].mT.contiguous().mT},
        ValueError,
        "k_cache: expected the last dimension contiguous",
    ),
    ({}, {"v_cache": PLAIN["v_cache"][:, 1:]}, ValueError, "v_cache: expected k_cache's shape"),
    ({"out": torch.empty(2, 4, 16)}, {"out": torch.empty(2, 4, 17)}, ValueError, "out: expected shape"),
    ({"out": torch.empty(2, 4, 16)}, {"out": 1.0}, TypeError, "out: expected a torch.Tensor, got float"),
    ({"workspace": workspace(0)}, {"workspace": torch.empty(0)}, ValueError, "workspace: expected at least"),
    ({"workspace": workspace(0)}, {"workspace": workspace(0)[::2]}, ValueError, "workspace: expected a contiguous"),
    ({"workspace": workspace(0)}, {"workspace": workspace(0)[1:]}, ValueError, "workspace: expected a 16-byte aligned"),
    ({}, {"policy": "fast"}, ValueError, "policy: .*'fast'"),
    ({}, {"policy": ["auto"]}, TypeError, "policy: .*got list"),
    ({}, {"backend": "gpu"}, ValueError, "backend: .*'gpu'"),
    ({}, {"backend": None}, TypeError, "backend: .*got NoneType"),
]


@pytest.mark.parametrize(("good", "bad", "error", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_each_time_though_its_like_is_known(
    good: dict[str, Any], bad: dict[str, Any], error: type[Exception], words: str, launches: list[MemoryLaunch]
) -> None:
    good = {"policy": "pinned(4)"} | PLAIN | good  # one that splits, and so needs its workspace
    for _ in range(2):
        decode_attention(**good)
    before = sum(launch.launches for launch in launches), len(attention._CALLS)
    for _ in range(2):
        with pytest.raises(error, match=words):
            decode_attention(**good | bad)
    assert (sum(launch.launches for launch in launches), len(attention._CALLS)) == before == (2, 1)


def test_values_are_still_checked_where_that_is_asked_for(
    launches: list[MemoryLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_attention(**PLAIN)
    monkeypatch.setenv("SPLITKV_CHECK", "1")
    for _ in range(2):
        decode_attention(**PLAIN)
    with pytest.raises(ValueError, match="seq_lens: expected 0..64 .*, got 65 in row 1"):
        decode_attention(**PLAIN | {"seq_lens": ints(3, 65)})
    assert len(attention._CALLS) == 1


def test_the_sign_of_a_zero_scale_is_seen(launches: list[MemoryLaunch]) -> None:
    positive, negative = (decode_attention(**PLAIN, v_scale=scale) for scale in (0.0, -0.0))
    assert isinstance(positive, Tensor) and isinstance(negative, Tensor)
    assert torch.equal(positive.signbit(), ~negative.signbit()) and not positive.any()


def test_a_memo_is_bounded_and_forgets_the_oldest(launches: list[MemoryLaunch]) -> None:
    decode_attention(**PLAIN)
    (known,) = attention._CALLS._calls.values()
    memo = CallMemo(8)
    for number in range(100):
        memo.keep(number, known)
        assert len(memo) <= 8 and memo.find(number, 0) is known
    assert memo.find(99, CAPACITY) is known
    assert memo.find(99, CAPACITY + 1) is memo.find(99, -1) is memo.find(3, 0) is None
    memo.keep(None, known)
    memo.keep(5, None)
    assert memo.find(5, 0) is None
    memo.clear()
    assert len(memo) == 0


def test_no_tensor_is_kept(launches: list[MemoryLaunch]) -> None:
    arguments = call(sinks=torch.zeros(Q_HEADS), mask=torch.zeros(CAPACITY), return_lse=True, policy="4")
    arguments["workspace"] = workspace(0)
    held = [weakref.ref(value) for value in arguments.values() if isinstance(value, Tensor)]
    decode_attention(**arguments)
    assert len(attention._CALLS) == 1
    del arguments
    gc.collect()
    assert len(held) == 7 and all(reference() is None for reference in held)


def test_threads_share_a_memo(launches: list[MemoryLaunch]) -> None:
    """Eight threads, three kinds, and a memo too small for them."""
    attention._CALLS._size = 2
    tried = [call(seed, window=window) for seed in range(4) for window in (3, 9, None)]
    want = [decode_attention(**arguments) for arguments in tried]
    wrong: list[int] = []

    def work() -> None:
        for i in range(10 * len(tried)):
            if not torch.equal(decode_attention(**tried[i % len(tried)]), want[i % len(tried)]):  # type: ignore[arg-type]
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(attention._CALLS) <= 2


def test_an_object_keeps_its_own_calls(launches: list[MemoryLaunch]) -> None:
    arguments = call()
    attend = DecodeAttention(check_inputs(**arguments).problem, "pinned(4)", device="cpu")
    out = torch.empty_like(arguments["q"])
    for seed in range(3):
        arguments = call(seed)
        assert attend.run(**arguments, out=out) is out
        assert torch.equal(out, decode_attention(**arguments, policy="pinned(4)"))  # type: ignore[arg-type]
    assert [launch.launches for launch in launches] == [3, 3]
    with pytest.raises(TypeError, match="unexpected keyword argument 'workspace'"):
        attend.run(**arguments, workspace=None)
