"""The decode loop: prefill in chunks, then one step per token, which on a GPU is one captured graph.

A step reads the last tokens, writes the next ones, and knows the lengths from the device alone. So the graph that
is captured with an empty cache is right at every length, and the host only reads tokens, one step behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..backends.launching import on_device
from .decoder import Decoder
from .sampling import Sampler
from .state import DecodeState

CPU_CHUNK, CUDA_CHUNK = 512, 2048
"""Tokens of one prefill chunk: enough to keep the matrices busy, few enough for small activations."""
_WARM_UP_STEPS = 3

Progress = Callable[[int, int, str], None]


class DecodeLoop:
    """Rows of a decoder that are filled and then continued together.

    state: empty. sampler: on the decoder's device, default greedy. graph: capture the step in a CUDA graph (default:
    on a GPU). tokens: [batch] int64 on the device, each row's latest.
    """

    def __init__(
        self, decoder: Decoder, state: DecodeState, sampler: Sampler | None = None, graph: bool | None = None
    ) -> None:
        self.decoder, self.state = decoder, state
        self.sampler = Sampler(device=decoder.device) if sampler is None else sampler
        if self.sampler.generator.device.type != decoder.device.type:
            raise ValueError(f"sampler: expected one on {decoder.device}, got {self.sampler.generator.device}")
        self.tokens = torch.zeros(state.batch, dtype=torch.int64, device=decoder.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ahead = decoder.device.type == "cuda"
        if self._ahead if graph is None else graph:
            self._capture()

    def _step(self) -> None:
        self.tokens.copy_(self.sampler(self.decoder.decode(self.tokens, self.state)))

    @torch.no_grad()
    def _capture(self) -> None:
        """Warm up, which compiles kernels and moves the lengths, then capture and put everything back to empty."""
        with torch.cuda.device(self.decoder.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(min(_WARM_UP_STEPS, self.state.capacity)):
                    self._step()
            torch.cuda.current_stream().wait_stream(side)
            self.state.clear()
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.sampler.generator)
            with torch.cuda.graph(graph, stream=side):  # torch's own stream is of the device that captured first
                self._step()
        self._graph = graph
        self.state.clear()
        self.tokens.zero_()
        self.sampler.restart()

    @torch.no_grad()
    def step(self) -> None:
        """One more token in every row. The caller keeps lengths below the capacity."""
        with on_device(self.tokens):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()

    @torch.no_grad()
    def prefill(
        self, prompt: Sequence[int], row: int = 0, chunk: int | None = None, progress: Progress | None = None
    ) -> Tensor:
        """Fill a row with a prompt and choose its first new token. Returns the logits for it, [vocab_size] f32.

        chunk: tokens at a time. progress: called with tokens done, tokens in all, and a text. Raises ValueError for a
        prompt that is empty or longer than the capacity.
        """
        size = len(prompt)
        if not 1 <= size <= self.state.capacity:
            raise ValueError(f"prompt: expected 1 to {self.state.capacity} tokens, got {size}")
        step = chunk or (CUDA_CHUNK if self.decoder.device.type == "cuda" else CPU_CHUNK)
        ids = torch.tensor(prompt, dtype=torch.int64).to(self.decoder.device)
        self.state.clear_row(row)
        with on_device(self.tokens):
            for start in range(0, size, step):
                if progress is not None:
                    progress(start, size, "prefill")
                logits = self.decoder.prefill(ids[start : start + step], self.state, row, start)
            self.state.seq_lens[row] = size
            self.tokens[row] = self.sampler(logits[None])[0]
        self.finish()
        if progress is not None:
            progress(size, size, "prefill")
        return logits

    def generate(self, count: int) -> Iterator[list[int]]:
        """Up to `count` tokens of every row, the one that prefill chose first. On a GPU one step runs ahead."""
        slots = [_Slot(self.tokens) for _ in range(2)]
        for i in range(count):
            if i and not self._ahead:
                self.step()
            slot = slots[i % 2]
            slot.take(self.tokens)
            if self._ahead and i + 1 < count:
                self.step()
            yield slot.read()

    def finish(self) -> None:
        """Wait for the device."""
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)


class _Slot:
    """A copy of the tokens on the host that does not stop the device."""

    def __init__(self, tokens: Tensor) -> None:
        self.on_gpu = tokens.is_cuda
        self.copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=self.on_gpu)
        self.ready = torch.cuda.Event() if self.on_gpu else None

    def take(self, tokens: Tensor) -> None:
        self.copy.copy_(tokens, non_blocking=self.on_gpu)
        if self.ready is not None:
            self.ready.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[int]:
        if self.ready is not None:
            self.ready.synchronize()
        return [int(token) for token in self.copy.tolist()]
