"""From logits to the next token, on the device: the largest, or drawn at a temperature from the likeliest."""

from __future__ import annotations

import torch
from torch import Tensor


class Sampler:
    """temperature: 0 takes the largest logit. top_p: draw only from the likeliest tokens that have this probability
    together, 1 for all. seed: of the draws. Works inside a CUDA graph, which must register `generator`.

    Raises ValueError for values out of range.
    """

    def __init__(
        self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        if not 0.0 <= temperature < float("inf"):
            raise ValueError(f"temperature: expected 0 or more, got {temperature}")
        if not 0.0 < top_p <= 1.0:
            raise ValueError(f"top_p: expected above 0 and at most 1, got {top_p}")
        self.temperature, self.top_p, self.seed = temperature, top_p, seed
        self.generator = torch.Generator(device)
        self.restart()

    def restart(self) -> None:
        """The draws from their beginning."""
        self.generator.manual_seed(self.seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """[batch] int64 from logits [batch, vocab_size] f32."""
        if self.temperature == 0.0:
            return largest(logits)
        probabilities = torch.softmax(logits / self.temperature, -1)
        if self.top_p < 1.0:
            ordered, order = probabilities.sort(-1, descending=True)
            # A token stays if those before it have less than top_p together: so the likeliest always does.
            kept = torch.where(ordered.cumsum(-1) - ordered < self.top_p, ordered, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, kept)
        # The largest of p / e with exponential e is token i with probability p_i; unlike multinomial it never syncs.
        noise = torch.empty_like(probabilities).exponential_(generator=self.generator)
        return largest(probabilities / noise)


def largest(values: Tensor) -> Tensor:
    """[batch] int64: where rows of values [batch, size] are largest."""
    if not values.is_cuda:
        return values.argmax(-1)
    from .sampling_kernels import argmax

    return argmax(values)
