"""DecodeAttention's state: what it compiled, what it grew to, and whose scratch a call uses. Captures and streams are
pretended; tests/gpu/test_decode_attention_gpu.py has real ones."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitkv import DecodeAttention, DecodeProblem, decode_attention, decode_loop, plan_decode, prepared
from splitkv.backends import TENSORS

POLICY = "pinned(4)"
HEADS = dict(num_q_heads=4, num_kv_heads=2, head_dim=16, q_dtype="f32", kv_dtype="f32")


def problem(batch: int = 2, capacity: int = 64, **changes: Any) -> DecodeProblem:
    return DecodeProblem(batch=batch, capacity=capacity, **HEADS | changes)


def call(batch: int = 2, capacity: int = 64, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch + capacity)
    q = torch.randn(batch, 4, 16, generator=generator)
    k, v = (torch.randn(batch, capacity, 2, 16, generator=generator) for _ in range(2))
    return dict(q=q, k_cache=k, v_cache=v, seq_lens=capacity - 3) | changes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pretended GPU: its current stream, whether that is captured, and the address of scratch of each launch."""
    state = SimpleNamespace(stream=7, capturing=False, scratch=[])

    class Launch:
        def __init__(self, arguments: dict[str, Any]) -> None:
            options = ("sinks", "starts", "mask", "lse")
            self.variant: Hashable = tuple(name for name in options if arguments[name] is not None)

        def __call__(self, addresses: Sequence[int], uniform_len: int) -> None:
            state.scratch.append(addresses[TENSORS.index("workspace")])

    monkeypatch.setattr(decode_loop, "current_stream", lambda device: state.stream)
    monkeypatch.setattr(decode_loop, "capturing", lambda device: state.capturing)
    monkeypatch.setattr(prepared, "preparer", lambda name: lambda **arguments: Launch(arguments))
    for name in prepared.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return state


# ---- warm-up and capture -----------------------------------------------------------------------------------


def test_a_capture_takes_only_what_was_run_before(gpu: SimpleNamespace) -> None:
    attend = DecodeAttention(problem(), POLICY, device="cpu")
    sinks, starts = torch.zeros(4), torch.zeros(2, dtype=torch.int32)
    gpu.capturing = True
    refusal = "run: expected a first call before the capture of a CUDA graph, as it compiles; got none of this kind"
    with pytest.raises(RuntimeError, match=refusal):
        attend.run(**call())
    gpu.capturing = False
    attend.run(**call())
    attend.run(**call(sinks=sinks))
    gpu.capturing = True
    attend.run(**call())
    attend.run(**call(sinks=sinks, window=5, softmax_scale=0.1, out=torch.empty(2, 4, 16)))  # the same code
    for other in ({"starts": starts}, {"sinks": sinks, "starts": starts}, {"return_lse": True}):
        with pytest.raises(RuntimeError, match=refusal):
            attend.run(**call(**other))
    assert len(gpu.scratch) == 4, "a refused call was launched"


def test_bad_input_inside_a_capture_is_named_first(gpu: SimpleNamespace) -> None:
    attend = DecodeAttention(problem(), POLICY, device="cpu")
    gpu.capturing = True
    with pytest.raises(ValueError, match="window: .*-1"):
        attend.run(**call(window=-1))


# ---- scratch -----------------------------------------------------------------------------------------------


def test_each_stream_has_scratch_of_its_own(gpu: SimpleNamespace) -> None:
    attend = DecodeAttention(problem(), POLICY, device="cpu")
    used: dict[int, set[int]] = {}
    for _ in range(3):
        for gpu.stream in (7, 8, 9):
            assert attend.workspace.nbytes == attend.workspace_bytes == attend.plan.workspace_bytes > 0
            attend.run(**call())
            assert gpu.scratch[-1] == attend.workspace.data_ptr()
            used.setdefault(gpu.stream, set()).add(gpu.scratch[-1])
    assert all(len(addresses) == 1 for addresses in used.values())
    assert len(set().union(*used.values())) == 3


def test_a_capture_takes_scratch_from_no_stream(gpu: SimpleNamespace) -> None:
    """On the stream of the warm-up too: the graph may be replayed on another, while that one goes on."""
    attend = DecodeAttention(problem(), POLICY, device="cpu")
    attend.run(**call())
    mine = attend.workspace.data_ptr()
    gpu.capturing = True
    for gpu.stream in (7, 8):
        for _ in range(2):  # known by now, or not
            attend.run(**call())
            assert gpu.scratch[-1] not in (0, mine)
    gpu.capturing, gpu.stream = False, 7
    attend.run(**call())
    assert gpu.scratch[-1] == mine


def test_a_plan_of_one_split_has_no_scratch(gpu: SimpleNamespace) -> None:
    attend = DecodeAttention(problem(), "off", device="cpu")
    for _ in range(2):
        attend.run(**call())
    assert gpu.scratch == [0, 0] and attend.workspace_bytes == attend.workspace.nbytes == 0


def test_threads_take_turns(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch is split and merge: another thread's must not come between, as both use one scratch."""
    attend = DecodeAttention(problem(), POLICY, device="cpu")
    attend.run(**call())
    inside, most = [0], [0]
    (known,) = attend._calls._calls.values()
    launch = known.launch

    def slow(addresses: Sequence[int], uniform_len: int) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.002)
        launch(addresses, uniform_len)
        inside[0] -= 1

    object.__setattr__(known, "launch", slow)
    threads = [threading.Thread(target=lambda: [attend.run(**call()) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gpu.scratch) == 21 and most == [1]


# ---- growth ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(3, 64), (2, 65), (5, 256)], ids=str)
def test_it_grows_with_its_tensors(size: tuple[int, int]) -> None:
    attend = DecodeAttention(problem(), POLICY, device="cpu")
    attend.run(**call())
    small, scratch = attend.workspace_bytes, attend.workspace
    for _ in range(2):
        out, lse = attend.run(**call(*size), return_lse=True)
        want, want_lse = decode_attention(**call(*size), policy=POLICY, return_lse=True)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        assert attend.generation == 1 and attend.problem == problem(*size)
    assert attend.plan == plan_decode(problem(*size), attend.plan.device, POLICY)
    assert attend.workspace_bytes == attend.plan.workspace_bytes >= small
    assert attend.workspace.nbytes >= attend.workspace_bytes
    assert (attend.workspace is scratch) == (attend.workspace_bytes == small)


def test_growth_gives_every_stream_scratch_that_is_large_enough(gpu: SimpleNamespace) -> None:
    attend = DecodeAttention(problem(), POLICY, device="cpu")
    for gpu.stream in (7, 8):
        attend.run(**call())
    attend.run(**call(9))
    for gpu.stream in (7, 8):
        assert attend.workspace.nbytes == attend.workspace_bytes
        attend.run(**call(9))
        assert gpu.scratch[-1] == attend.workspace.data_ptr()


def test_it_never_shrinks_and_changes_nothing_else(gpu: SimpleNamespace) -> None:
    attend = DecodeAttention(problem(), POLICY, device="cpu")
    attend.run(**call())
    attend.run(**call(3, 80))
    others = [call(), call(3), call(2, 80), call(2, 99), call(3, 80, q=torch.zeros(3, 2, 4, 16))]
    for other in (*others, call(4, 80, q=torch.zeros(4, 8, 16))):
        with pytest.raises(ValueError, match="run: expected tensors of DecodeProblem.*larger batch or capacity, got"):
            attend.run(**other)
    assert attend.problem == problem(3, 80) and attend.generation == 1 and len(gpu.scratch) == 2


def test_a_call_that_is_refused_grows_nothing(gpu: SimpleNamespace) -> None:
    attend = DecodeAttention(problem(), POLICY, device="cpu")
    for bad in ({"out": torch.empty(1)}, {"backend": "none"}, {"window": -1}, {"seq_lens": 999}):
        with pytest.raises(ValueError):
            attend.run(**call(3, 80) | bad)
    assert attend.problem == problem() and attend.generation == 0


def test_growth_inside_a_capture_is_refused(gpu: SimpleNamespace) -> None:
    attend = DecodeAttention(problem(), POLICY, device="cpu")
    attend.run(**call())
    gpu.capturing = True
    with pytest.raises(RuntimeError, match=r"run: expected tensors of .*batch=2.* inside the capture .*got .*batch=3"):
        attend.run(**call(3))
    assert attend.generation == 0 and attend.problem == problem()
    gpu.capturing = False
    attend.run(**call(3))
    gpu.capturing = True
    attend.run(**call(3))
    assert attend.generation == 1


def test_a_graph_of_before_the_growth_is_named(gpu: SimpleNamespace) -> None:
    attend = DecodeAttention(problem(), POLICY, device="cpu")
    attend.run(**call())
    made_at = attend.generation
    attend.check_graph(made_at)
    attend.run(**call(3))
    with pytest.raises(RuntimeError, match=r"expected one captured at generation 1 .*got one of generation 0: capture"):
        attend.check_graph(made_at)
    attend.check_graph(attend.generation)
