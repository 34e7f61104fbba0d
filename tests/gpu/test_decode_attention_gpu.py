"""DecodeAttention and repeated calls on a GPU: captures, streams, growth, and answers that do not depend on whether a
call was looked up."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from helpers import int32, make_inputs, page_order, to_pages
from torch import Tensor

from splitkv import (
    DecodeAttention,
    DecodeProblem,
    DeviceSpec,
    SplitPolicy,
    attention,
    decode_attention,
    plan_decode,
    prepared,
)
from splitkv.backends import launcher, triton_launch
from splitkv.prepared import CallMemo

if triton_launch.INTERPRETED:
    pytest.skip("the interpreter prepares nothing", allow_module_level=True)

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 2, 8, 2, 64, 4096


def inputs(seed: int = 0, batch: int = BATCH, capacity: int = CAPACITY, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    q, k, v = make_inputs(batch, Q_HEADS, KV_HEADS, HEAD_DIM, capacity, dtype=torch.bfloat16, device="cuda", seed=seed)
    lens = int32([capacity - 7 * row - seed for row in range(batch)], "cuda")
    return dict(q=q, k_cache=k, v_cache=v, seq_lens=lens, backend="triton") | changes


def problem(batch: int = BATCH, capacity: int = CAPACITY) -> DecodeProblem:
    return DecodeProblem(batch, Q_HEADS, KV_HEADS, HEAD_DIM, capacity=capacity)


def paged(seed: int) -> dict[str, Any]:
    made = inputs(seed)
    table, pages = page_order(BATCH, CAPACITY, 16)
    made["k_cache"], made["v_cache"] = (to_pages(made[name], table, pages, 16) for name in ("k_cache", "v_cache"))
    return made | {"block_table": table.cuda()}


def outcome(**arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = decode_attention(**arguments, return_lse=True)
    return out.clone(), lse.clone()


KINDS: dict[str, Any] = {
    "plain": inputs,
    "one length": lambda seed: inputs(seed, seq_lens=3000 + seed),
    "paged": paged,
    "one split": lambda seed: inputs(seed, policy="off"),
    "rowwise": lambda seed: inputs(seed, backend="rowwise"),
    "many options": lambda seed: inputs(
        seed,
        window=500,
        softcap=20.0,
        sinks=torch.randn(Q_HEADS, device="cuda"),
        starts=int32([3, 5 + seed], "cuda"),
        mask=torch.rand(BATCH, 1, 1, CAPACITY, device="cuda") < 0.8,
        k_scale=torch.rand(KV_HEADS, device="cuda"),
        v_scale=0.5,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_call_gives_the_bytes_of_tritons_own_launch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = [KINDS[kind](seed) for seed in range(4)]
    with monkeypatch.context() as public:
        public.setattr(prepared, "preparer", lambda name: lambda **_: None)
        public.setattr(attention, "_CALLS", CallMemo())
        want = [outcome(**arguments) for arguments in tried]
        assert len(attention._CALLS) == 0
    monkeypatch.setattr(attention, "_CALLS", CallMemo())
    for _ in range(2):
        for arguments, expected in zip(tried, want, strict=True):
            assert all(map(torch.equal, outcome(**arguments), expected))
    assert len(attention._CALLS) == 1, "a repeated call was not looked up"
    (call,) = attention._CALLS._calls.values()
    assert all(kernel._direct is not None for kernel in call.launch._kernels), "not launched directly"  # type: ignore


def test_a_misaligned_tensor_is_another_kind() -> None:
    made = inputs()
    want = outcome(**made)
    room = torch.empty(made["q"].numel() + 1, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):
        moved = room[1:].view(made["q"].shape).copy_(made["q"])
        assert all(map(torch.equal, outcome(**made | {"q": moved}), want))
        assert all(map(torch.equal, outcome(**made), want))


def test_bad_input_is_refused_after_a_good_call_of_its_like() -> None:
    made = inputs(seq_lens=5)
    for _ in range(2):
        decode_attention(**made)
    for change, error in (({"seq_lens": CAPACITY + 1}, ValueError), ({"window": True}, TypeError)):
        with pytest.raises(error):
            decode_attention(**made | change)
    with pytest.raises(ValueError, match="all on one device"):
        decode_attention(**made | {"q": made["q"].cpu()})


def test_a_profiler_sees_repeated_calls() -> None:
    from triton import knobs

    made, seen = inputs(), []
    for _ in range(2):
        decode_attention(**made)
    want = decode_attention(**made)

    def enter(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(enter)
    try:
        got = decode_attention(**made)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    assert seen == ["split_kernel", "merge_kernel"] and torch.equal(got, want)  # type: ignore[arg-type]


# ---- captures ----------------------------------------------------------------------------------------------


def captured(call: Any, stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def test_a_capture_whose_options_need_another_kernel_is_refused() -> None:
    made, attend = inputs(), DecodeAttention(problem())
    out, sinks = torch.empty_like(made["q"]), torch.randn(Q_HEADS, device="cuda")
    with pytest.raises(RuntimeError, match="expected a first call before the capture"):
        captured(lambda: attend.run(**made, out=out))
    attend.run(**made)
    with pytest.raises(RuntimeError, match="expected a first call before the capture"):
        captured(lambda: attend.run(**made, out=out, sinks=sinks))
    torch.cuda.synchronize()
    graph = captured(lambda: attend.run(**made, out=out, window=600))  # the same kernel
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, decode_attention(**made, window=600))  # type: ignore[arg-type]


def test_one_stream_for_warm_up_capture_and_eager_calls() -> None:
    """The graph's scratch is its own even there: it is replayed elsewhere while the stream goes on."""
    made, attend = inputs(), DecodeAttention(problem())
    out, want = torch.empty_like(made["q"]), outcome(**made)[0]
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        attend.run(**made)
    graph = captured(lambda: attend.run(**made, out=out), side)
    torch.cuda.synchronize()
    eager = []
    for _ in range(50):
        with torch.cuda.stream(other):
            graph.replay()
        with torch.cuda.stream(side):
            eager.append(attend.run(**made))
    torch.cuda.synchronize()
    assert torch.equal(out, want) and all(torch.equal(each, want) for each in eager)


def test_two_graphs_of_one_object_may_run_at_once() -> None:
    attend, graphs = DecodeAttention(problem()), []
    for seed in range(2):
        made = inputs(seed)
        out, want = torch.empty_like(made["q"]), outcome(**made)[0]
        attend.run(**made)
        graphs.append((captured(lambda m=made, o=out: attend.run(**m, out=o)), torch.cuda.Stream(), out, want, made))
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream, *_ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for _, _, out, want, _ in graphs)


# ---- streams -----------------------------------------------------------------------------------------------


def test_streams_that_interleave_share_no_scratch() -> None:
    attend = DecodeAttention(problem())
    calls = [inputs(seed) for seed in range(3)]
    want = [outcome(**made)[0] for made in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in calls]
    for _ in range(50):
        for made, stream, got in zip(calls, streams, results, strict=True):
            with torch.cuda.stream(stream):
                got.append(attend.run(**made))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for got, expected in zip(results, want, strict=True) for each in got)
    places = set()
    for stream in streams:
        with torch.cuda.stream(stream):
            places.add(attend.workspace.data_ptr())
            assert attend.workspace.nbytes == attend.workspace_bytes
    assert len(places) == len(streams)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("streams", [1, 4])
def test_threads_that_interleave_share_no_scratch(streams: int, backend: str) -> None:
    """Calls without a workspace: between the two kernels of one, another thread launches its own."""
    calls = [inputs(seed, backend=backend) for seed in range(4)]
    want = [decode_attention(**made) for made in calls]
    side = [torch.cuda.Stream() for _ in range(streams)]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(side[number % streams]):
            got = [decode_attention(**calls[number]) for _ in range(200)]
            torch.cuda.current_stream().synchronize()
            if not all(torch.equal(each, want[number]) for each in got):  # type: ignore[arg-type]
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_graph_keeps_scratch_of_its_own_beside_calls_that_reuse_theirs() -> None:
    """Captured on the stream of eager calls, replayed on another beside more of them, and after theirs was replaced."""
    made, other = inputs(0), inputs(1)
    big = inputs(2, batch=64)
    want, other_want = decode_attention(**made), decode_attention(**other)
    out = torch.empty_like(made["q"])
    stream, beside = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        decode_attention(**made, out=out)
        graph = captured(lambda: decode_attention(**made, out=out), stream)
        for round in range(50):
            with torch.cuda.stream(beside):
                graph.replay()
            got = decode_attention(**other)
            if round % 10 == 0:
                decode_attention(**big)
            torch.cuda.synchronize()
            assert torch.equal(out, want) and torch.equal(got, other_want)  # type: ignore[arg-type]
            out.fill_(torch.nan)


# ---- growth ------------------------------------------------------------------------------------------------


def test_growth_outside_a_capture_and_the_graph_from_before_it() -> None:
    made, attend = inputs(), DecodeAttention(problem(), SplitPolicy.auto())
    out, want = torch.empty_like(made["q"]), outcome(**made)[0]
    attend.run(**made)
    graph, made_at = captured(lambda: attend.run(**made, out=out)), attend.generation
    attend.check_graph(made_at)

    larger = inputs(1, batch=8, capacity=4 * CAPACITY)
    with pytest.raises(RuntimeError, match="inside the capture of a CUDA graph"):
        captured(lambda: attend.run(**larger))
    torch.cuda.synchronize()
    assert attend.generation == made_at
    small = attend.workspace_bytes
    for _ in range(2):
        assert torch.equal(attend.run(**larger), decode_attention(**larger))  # type: ignore[arg-type]
    assert attend.problem == problem(8, 4 * CAPACITY) and attend.workspace_bytes > small
    with pytest.raises(RuntimeError, match="capture it again"):
        attend.check_graph(made_at)

    torch.cuda.empty_cache()
    filler = torch.full((1 << 28,), torch.nan, device="cuda")  # over whatever growth freed
    before = filler.isnan().all()
    out.zero_()
    graph.replay()  # stale, and harmless
    assert torch.equal(out, want) and before and filler.isnan().all()

    grown = torch.empty_like(larger["q"])
    again = captured(lambda: attend.run(**larger, out=grown))
    again.replay()
    assert torch.equal(grown, decode_attention(**larger))  # type: ignore[arg-type]
    attend.check_graph(attend.generation)


def test_the_public_launch_still_runs() -> None:
    """What a Triton whose launcher is not known falls back to."""
    made = inputs()
    assert launcher("triton") is triton_launch.launch
    plan = plan_decode(problem(), DeviceSpec.current(), backend="triton")
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(made["q"])
    arguments = dict(block_table=None, softmax_scale=HEAD_DIM**-0.5, window=0, softcap=0.0, sinks=None, starts=None)
    arguments |= dict(mask=None, k_scale=1.0, v_scale=1.0, lse=None, workspace=workspace, plan=plan)
    triton_launch.launch(**made | {"q": made["q"].unsqueeze(1)}, out=out.unsqueeze(1), **arguments)
    assert torch.equal(out, decode_attention(**made))  # type: ignore[arg-type]
