"""Sampling: greedy, the distribution of draws, top-p, and seeds."""

from __future__ import annotations

import pytest
import torch

from splitkv.models.sampling import Sampler

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -5.0])
DRAWS = 20_000


def drawn(**options: float) -> torch.Tensor:
    """How often each token is drawn."""
    sampler = Sampler(**{"temperature": 1.0, **options})  # type: ignore[arg-type]
    return torch.bincount(sampler(LOGITS.expand(DRAWS, -1)), minlength=5) / DRAWS


def test_greedy_takes_the_largest() -> None:
    assert Sampler()(torch.stack([LOGITS, LOGITS.flip(0)])).tolist() == [0, 4]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, 0)
    # 4.5 standard deviations: one run in 100,000 and more would fail, and this seed is fixed
    assert ((drawn(temperature=temperature) - expected).abs() < 4.5 * (expected * (1 - expected) / DRAWS).sqrt()).all()


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    p = torch.softmax(LOGITS, 0)  # 0.64 0.24 0.09 0.03 0.0006
    for top_p, kept in ((0.5, 1), (0.7, 2), (0.95, 3), (1.0, 5)):
        shares = drawn(top_p=top_p)
        assert (shares > 0).sum() <= kept and shares[kept:].sum() == 0
        expected = p[:kept] / p[:kept].sum()
        assert ((shares[:kept] - expected).abs() < 0.02).all()


def test_the_same_seed_draws_the_same() -> None:
    def draws(sampler: Sampler) -> list[int]:
        return [int(sampler(LOGITS[None])) for _ in range(50)]

    first, again, other = Sampler(1.0, seed=3), Sampler(1.0, seed=3), Sampler(1.0, seed=4)
    taken = draws(first)
    assert draws(again) == taken != draws(other)
    first.restart()
    assert draws(first) == taken


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature: expected 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature: expected 0 or more, got nan"),
        ({"temperature": float("inf")}, "temperature: expected 0 or more, got inf"),
        ({"top_p": 0.0}, "top_p: expected above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p: expected above 0 and at most 1, got 1.5"),
    ],
)
def test_values_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**options)  # type: ignore[arg-type]
