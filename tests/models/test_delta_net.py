"""The gated delta rule: one step against the recurrence written out in float64, chunks against steps."""

from __future__ import annotations

import pytest
import torch

from splitkv.models.delta_net import CHUNK, delta_chunks, delta_step

HEADS, KEYS, VALUES = 3, 16, 24


def inputs(tokens: int, decay: float = 1.0) -> tuple[torch.Tensor, ...]:
    """q, k, v, log decay, beta, and a state to begin with; f32."""
    draw = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(tokens, HEADS, KEYS, generator=draw) for _ in range(2))
    v = torch.randn(tokens, HEADS, VALUES, generator=draw)
    g = -decay * torch.rand(tokens, HEADS, generator=draw)
    beta = torch.rand(tokens, HEADS, generator=draw)
    return q, k, v, g, beta, torch.randn(HEADS, KEYS, VALUES, generator=draw)


def written_out(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, last state) token by token and head by head, in float64."""
    q, k, v, g, beta, state = (t.double().clone() for t in arguments)
    out = torch.zeros_like(v)
    for t in range(q.shape[0]):
        for h in range(HEADS):
            key = k[t, h] / (k[t, h].square().sum() + 1e-6).sqrt()
            query = q[t, h] / (q[t, h].square().sum() + 1e-6).sqrt() / KEYS**0.5
            memory = torch.exp(g[t, h]) * state[h]
            memory = memory + beta[t, h] * torch.outer(key, v[t, h] - memory.T @ key)
            state[h], out[t, h] = memory, memory.T @ query
    return out, state


@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_chunks(tokens: int) -> None:
    *parts, state = inputs(tokens)
    expected, last = written_out(*parts, state)
    out = delta_chunks(*parts, state)
    assert (out - expected).abs().max() < 1e-5 and (state - last).abs().max() < 1e-5


def test_strong_decay_neither_overflows_nor_loses_the_answer() -> None:
    *parts, state = inputs(2 * CHUNK, decay=40.0)  # exp(-40 * 64) is 0 and its inverse infinite
    expected, last = written_out(*parts, state)
    out = delta_chunks(*parts, state)
    assert out.isfinite().all() and (out - expected).abs().max() < 1e-5 and (state - last).abs().max() < 1e-5


def test_steps_and_where_a_run_is_cut_do_not_matter() -> None:
    *parts, state = inputs(100)
    expected, last = written_out(*parts, state)
    rows = state[None].clone()
    out = torch.cat([delta_step(*(t[i : i + 1] for t in parts), rows) for i in range(100)])
    assert (out - expected).abs().max() < 1e-5 and (rows[0] - last).abs().max() < 1e-5
    cut = torch.cat([delta_chunks(*(t[:37] for t in parts), state), delta_chunks(*(t[37:] for t in parts), state)])
    assert (cut - expected).abs().max() < 1e-5 and (state - last).abs().max() < 1e-5
