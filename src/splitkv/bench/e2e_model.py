"""What `splitkv bench e2e` decodes with: random weights, a prompt that was really prefilled, and filled caches.

Rows start from the same prompt with a token of their own each. Where a depth is longer than the prompt, random keys
and values follow it, the same for the same seed whatever the batch, the capacity and the KV dtype (but for rounding).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.decoder import Decoder
from ..models.loop import CPU_CHUNK, CUDA_CHUNK
from ..models.state import DecodeState, short_name

EMBEDDING_STD = 0.02
"""Small, so that with a tied output matrix a token is not its own likeliest successor."""
DECAY_RATE = -0.1
"""Of the delta nets' log decay: a state that still holds some of the last hundred tokens."""
KEY_SCALE = 3.0
"""Of random keys. With unit-normal ones all keys weigh about the same, V averages to nothing, and tokens and logits
would say nothing about attention; at 3, a few dozen of 262,144 keys have most of the weight."""
FILL_TOKENS = 4096


@torch.no_grad()
def random_weights(decoder: Decoder, seed: int) -> None:
    """Every matrix normal with variance 1 / columns, so that activations keep their size; norms 1, biases small."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for part in decoder.parts():
        if part.name.endswith("norm.weight"):
            part.dest.fill_(1.0)
        elif part.name.endswith("A_log"):
            part.dest.fill_(DECAY_RATE)
        elif part.name == "embed_tokens.weight" or part.dest.ndim == 1:
            part.dest.normal_(0, EMBEDDING_STD, generator=generator)
        else:
            part.dest.normal_(0, part.dest.shape[-1] ** -0.5, generator=generator)


@dataclass(frozen=True)
class Prompt:
    """One row that was prefilled.

    state: its keys and values, in the activations' dtype. tokens: how many. recurrent: the delta nets' (convolution,
    memory) by layer, after each depth at which the prefill stopped. seconds: that it took.
    """

    state: DecodeState
    tokens: int
    recurrent: dict[int, dict[int, tuple[Tensor, Tensor]]]
    seconds: float

    def recurrent_at(self, depth: int) -> dict[int, tuple[Tensor, Tensor]]:
        """After `depth` tokens, or after the whole prompt where it was not prefilled that far."""
        return self.recurrent[depth if depth in self.recurrent else self.tokens]

    def label(self, depth: int) -> str:
        """Whether a row of this depth is all prompt."""
        return "prefilled" if depth in self.recurrent else "filled"

    @property
    def bytes(self) -> int:
        """Of the keys, values and recurrent states held here."""
        held = sum(
            t.numel() * t.element_size() for layers in self.recurrent.values() for p in layers.values() for t in p
        )
        return held + sum(cache.bytes for cache in self.state.caches.values())


def prompt_stops(depths: Collection[int], longest: int) -> list[int]:
    """Depths that are prefilled in full, ascending; where `longest` reaches none, one prompt of that many tokens."""
    return sorted(depth for depth in depths if depth <= longest) or [longest]


@torch.no_grad()
def make_prompt(decoder: Decoder, stops: Sequence[int], seed: int) -> Prompt:
    """Prefill random tokens, stopping at each of `stops` (ascending) to keep the recurrent states."""
    tokens = stops[-1]
    dtype = short_name(decoder.dtype)
    state = DecodeState(decoder.config, 1, tokens, dtype, decoder.dtype, decoder.device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(decoder.config.vocab_size, (tokens,), generator=generator).to(decoder.device)
    chunk = CUDA_CHUNK if decoder.device.type == "cuda" else CPU_CHUNK
    start_s, begin = time.perf_counter(), 0
    recurrent = {}
    for stop in stops:
        for start in range(begin, stop, chunk):
            decoder.prefill(ids[start : min(start + chunk, stop)], state, 0, start)
        recurrent[stop] = {layer: (state.conv[layer].clone(), state.memory[layer].clone()) for layer in state.conv}
        begin = stop
    synchronise(decoder.device)
    return Prompt(state, tokens, recurrent, time.perf_counter() - start_s)


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def fill(state: DecodeState, prompt: Prompt, seed: int) -> None:
    """Give every row of the caches the prompt's keys and values, and random ones behind them up to the capacity."""
    generator = torch.Generator(state.seq_lens.device)
    for layer, cache in state.caches.items():
        source = prompt.state.caches[layer]
        names = [("k_cache", KEY_SCALE), ("v_cache", 1.0)]
        if cache.v_cache.data_ptr() == cache.k_cache.data_ptr():  # latent attention: values are columns of the keys
            names.pop()
        for number, (name, scale) in enumerate(names):
            held, given = getattr(cache, name), getattr(source, name)
            held[:, : prompt.tokens].copy_(given[:, : prompt.tokens].expand(state.batch, -1, -1, -1))
            for row in range(state.batch):
                generator.manual_seed(((seed * 8191 + layer) * 8191 + row) * 2 + number)
                _fill_row(held[row], prompt.tokens, scale, generator)


def _fill_row(row: Tensor, start: int, scale: float, generator: torch.Generator) -> None:
    """Random values into row [capacity, heads, dim] from token `start` on; whole blocks are drawn, so that a block's
    values do not depend on where the row ends."""
    block = torch.empty((FILL_TOKENS, *row.shape[1:]), dtype=torch.float32, device=row.device)
    for begin in range(start, row.shape[0], FILL_TOKENS):
        values = block.normal_(0, scale, generator=generator)
        row[begin : begin + FILL_TOKENS].copy_(values[: row.shape[0] - begin])


@torch.no_grad()
def rewind(state: DecodeState, prompt: Prompt, depth: int) -> None:
    """Every row `depth` tokens long again. Keys behind that are overwritten by what is decoded next."""
    state.seq_lens.fill_(depth)
    for cache in state.caches.values():
        cache.seq_lens.fill_(depth)
    for layer, (conv, memory) in prompt.recurrent_at(depth).items():
        state.conv[layer].copy_(conv.expand_as(state.conv[layer]))
        state.memory[layer].copy_(memory.expand_as(state.memory[layer]))


def first_tokens(batch: int, vocab_size: int, device: torch.device) -> Tensor:
    """[batch] int64: another token for every row, so that their answers part."""
    return (torch.arange(1, batch + 1) * 7919 % vocab_size).to(device)
