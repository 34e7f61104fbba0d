"""Scratch that is kept from call to call: one call's at a time, one stream's alone, and never a captured graph's."""

from __future__ import annotations

import pytest
import torch

from splitkv.scratch import LEAST_BYTES, MOST_BYTES, STREAMS, Scratch

Q = torch.zeros(1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | bool]:
    """What the stand-in for a GPU says of its state: the current device and stream, and whether that is captured."""
    state: dict[str, int | bool] = {"device": 0, "stream": 7, "capturing": False}
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state["device"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: state["stream"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state["capturing"], raising=False)
    return state


def address(kept: Scratch, least_bytes: int, device: int | None = 0) -> int:
    """Of what a call is given."""
    tensor, waiting = kept.take(Q, device, least_bytes)
    assert tensor.dtype == torch.uint8 and tensor.ndim == 1 and tensor.numel() >= least_bytes
    assert tensor.data_ptr() % 16 == 0
    if waiting is not None:
        waiting.append(tensor)
    return tensor.data_ptr()


@pytest.mark.parametrize("device", [0, None])
def test_the_next_call_has_the_same(device: int | None, gpu: dict[str, int | bool]) -> None:
    kept = Scratch()
    first = address(kept, 100, device)
    assert {address(kept, size, device) for size in (1, 100, LEAST_BYTES)} == {first}
    grown = address(kept, LEAST_BYTES + 1, device)
    assert address(kept, 100, device) == grown


def test_calls_that_overlap_share_nothing() -> None:
    kept = Scratch()
    taken = [kept.take(Q, None, 100) for _ in range(3)]
    places = {tensor.data_ptr() for tensor, _ in taken}
    assert len(places) == 3
    for tensor, waiting in taken:
        assert waiting is not None
        waiting.append(tensor)
    again = [kept.take(Q, None, 100)[0] for _ in range(3)]
    assert {tensor.data_ptr() for tensor in again} == places


def test_each_stream_has_its_own_and_few_are_kept(gpu: dict[str, int | bool]) -> None:
    kept = Scratch()
    first, places = address(kept, 100), set()
    for stream in range(100, 100 + STREAMS - 1):
        gpu["stream"] = stream
        places.add(address(kept, 100))
    assert len(places) == STREAMS - 1 and first not in places
    gpu["stream"] = 7
    assert address(kept, 100) == first
    gpu["stream"] = 8  # one too many
    address(kept, 100)
    assert len(kept._waiting) == 1


@pytest.mark.parametrize("change", [{"capturing": True}, {"device": 1}], ids=["capture", "another device"])
def test_a_call_that_must_not_share_has_its_own(change: dict[str, int | bool], gpu: dict[str, int | bool]) -> None:
    kept = Scratch()
    tensor, waiting = kept.take(Q, 0, 100)
    assert waiting is not None
    waiting.append(tensor)
    gpu |= change
    other, none = kept.take(Q, 0, 100)
    assert none is None and other.data_ptr() != tensor.data_ptr()


def test_what_is_large_is_not_kept() -> None:
    tensor, waiting = Scratch().take(Q, None, MOST_BYTES + 1)
    assert waiting is None and tensor.numel() == MOST_BYTES + 1
    assert Scratch().take(Q, None, MOST_BYTES)[1] is not None
