"""The decoder: token ids to logits, in plain torch, with attention over the cache by splitkv.

Two ways through the same weights. `prefill` takes a chunk of one row's tokens and attends with torch's scaled
dot-product attention; `decode` takes one token of every row, reads and writes lengths on the device only, and so
can be captured in a CUDA graph. Projections that read the same input are one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attending import chunk_attention, rotate
from .config import DecoderConfig
from .delta_net import DeltaNetMixer
from .latent import LatentAttention
from .moe import ExpertMLP
from .parts import Part, RMSNorm, empty_weight, project
from .state import DecodeState
from .weights import Weights, check_names

if TYPE_CHECKING:
    from .fused import FusedStep

Rotations = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Cosine and sine of full attention's positions, and of those of layers with a window."""


class Attention(nn.Module):
    """Self-attention of one layer: grouped heads, rotary positions, optional norms of q and k, gate, and window."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.window = config.window if config.layer_types[layer] == "sliding_attention" else None
        dim, hidden = config.head_dim, config.hidden_size
        q, kv = config.num_q_heads * dim, config.num_kv_heads * dim
        self.sizes = (q * (2 if config.gated else 1), kv, kv)
        self.qkv = empty_weight(sum(self.sizes), hidden, dtype=dtype, device=device)
        self.out = empty_weight(hidden, q, dtype=dtype, device=device)
        self.qkv_bias = empty_weight(sum(self.sizes), dtype=dtype, device=device) if config.qkv_bias else None
        self.out_bias = empty_weight(hidden, dtype=dtype, device=device) if config.output_bias else None
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            norm = (dim, config.norm_eps, config.norm_offset, dtype, device)
            self.q_norm, self.k_norm = RMSNorm(*norm), RMSNorm(*norm)

    def _project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q [tokens, num_q_heads, head_dim], k, v [tokens, num_kv_heads, head_dim], and the gate of the output."""
        dim = self.config.head_dim
        q, k, v = project(x, self.qkv, self.qkv_bias).split(self.sizes, -1)
        k, v = k.unflatten(-1, (-1, dim)), v.unflatten(-1, (-1, dim))
        gate = None
        if self.config.gated:
            q, gate = q.unflatten(-1, (-1, 2 * dim)).chunk(2, -1)
        else:
            q = q.unflatten(-1, (-1, dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *rotation), rotate(k, *rotation), v, gate

    def _finish(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        return project(attended.flatten(-2), self.out, self.out_bias)

    def prefill(self, x: Tensor, rotation: tuple[Tensor, Tensor], state: DecodeState, row: int, start: int) -> Tensor:
        """x [tokens, hidden] at positions start, start + 1, .. of a row."""
        q, k, v, gate = self._project(x, rotation)
        keys, values = state.write_chunk(self.layer, k, v, row, start)
        config = self.config
        attended = chunk_attention(
            q, keys.to(q.dtype), values.to(q.dtype), self.window, config.softmax_scale, config.attention_softcap
        )
        return self._finish(attended, gate)

    def decode(self, x: Tensor, rotation: tuple[Tensor, Tensor], state: DecodeState) -> Tensor:
        """x [batch, hidden], one token a row, at the position before the state's length."""
        q, k, v, gate = self._project(x, rotation)
        return self._finish(state.attend(self.layer, q, k, v, self.window), gate)

    def step(self, norm: RMSNorm, now: FusedStep) -> None:
        """x += decode(norm(x)), by the kernels."""
        from .place_kernels import place

        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        projected = now.products.after_norm(now.x, norm, self.qkv, self.qkv_bias)
        cache, heads = now.state.caches[self.layer], self.config.num_q_heads
        q, gate = place(projected, norms, now.rotation, now.positions, cache, heads, self.config.gated)
        attended = now.state.attend_held(self.layer, q, self.window).flatten(-2)
        factor = None if gate is None else gate.flatten(-2)
        now.products.onto(now.x, attended, self.out, self.out_bias, factor)

    def parts(self, name: str) -> Iterator[Part]:
        for suffix, fused, out in (("weight", self.qkv, self.out), ("bias", self.qkv_bias, self.out_bias)):
            if fused is not None:
                for proj, rows in zip("qkv", fused.split(self.sizes), strict=True):
                    yield Part(f"{name}.{proj}_proj.{suffix}", rows)
            if out is not None:
                yield Part(f"{name}.o_proj.{suffix}", out)
        for letter, norm in (("q", self.q_norm), ("k", self.k_norm)):
            if norm is not None:
                yield from norm.parts(f"{name}.{letter}_norm")


class Layer(nn.Module):
    """Norm, attention or delta net, norm, feed-forward or experts; in some families a norm behind each of them."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        norm = (config.hidden_size, config.norm_eps, config.norm_offset, dtype, device)
        self.norm_in, self.norm_mlp = RMSNorm(*norm), RMSNorm(*norm)
        self.norm_mixed, self.norm_out = (RMSNorm(*norm) if config.sandwiched else None for _ in range(2))
        self.linear = config.layer_types[layer] == "linear_attention"
        self.local = config.layer_types[layer] == "sliding_attention"
        kind = DeltaNetMixer if self.linear else Attention if config.latent is None else LatentAttention
        self.mixer: DeltaNetMixer | Attention | LatentAttention = kind(config, layer, dtype, device)
        self.gelu = config.gelu
        experts = config.experts_of(layer)
        self.experts = None if experts is None else ExpertMLP(experts, config.hidden_size, dtype, device)
        if self.experts is None:
            self.gate_up = empty_weight(2 * config.intermediate_size, config.hidden_size, dtype=dtype, device=device)
            self.down = empty_weight(config.hidden_size, config.intermediate_size, dtype=dtype, device=device)

    def _feed_forward(self, x: Tensor, decoding: bool) -> Tensor:
        normed = self.norm_mlp(x)
        if self.experts is not None:
            made = self.experts.decode(normed) if decoding else self.experts.prefill(normed)
        else:
            gate, up = project(normed, self.gate_up).chunk(2, -1)
            gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
            made = project(gate * up, self.down)
        return x + (made if self.norm_out is None else self.norm_out(made))

    def _mixed(self, x: Tensor, mixed: Tensor) -> Tensor:
        return x + (mixed if self.norm_mixed is None else self.norm_mixed(mixed))

    def prefill(self, x: Tensor, rotations: Rotations, state: DecodeState, row: int, start: int) -> Tensor:
        mixed = self.mixer.prefill(self.norm_in(x), rotations[self.local], state, row, start)
        return self._feed_forward(self._mixed(x, mixed), False)

    def decode(self, x: Tensor, rotations: Rotations, state: DecodeState) -> Tensor:
        mixed = self.mixer.decode(self.norm_in(x), rotations[self.local], state)
        return self._feed_forward(self._mixed(x, mixed), True)

    def step(self, now: FusedStep) -> None:
        """x = decode(x), by the kernels."""
        self.mixer.step(self.norm_in, now)
        if self.experts is not None:
            self.experts.step(self.norm_mlp, now)
        else:
            now.products.onto(now.x, now.products.swiglu(now.x, self.norm_mlp, self.gate_up), self.down)

    def parts(self, name: str) -> Iterator[Part]:
        yield from self.norm_in.parts(f"{name}.input_layernorm")
        yield from self.mixer.parts(f"{name}.{'linear_attn' if self.linear else 'self_attn'}")
        before = "post_attention_layernorm"
        if self.norm_mixed is not None and self.norm_out is not None:
            before = "pre_feedforward_layernorm"
            yield from self.norm_mixed.parts(f"{name}.post_attention_layernorm")
            yield from self.norm_out.parts(f"{name}.post_feedforward_layernorm")
        yield from self.norm_mlp.parts(f"{name}.{before}")
        if self.experts is not None:
            yield from self.experts.parts(f"{name}.mlp")
            return
        for proj, rows in zip(("gate", "up"), self.gate_up.chunk(2), strict=True):
            yield Part(f"{name}.mlp.{proj}_proj.weight", rows)
        yield Part(f"{name}.mlp.down_proj.weight", self.down)


class Decoder(nn.Module):
    """The model. Weights are uninitialised until `load` or `randomise`. dtype: of weights and activations.

    step: how `decode` is done, one of fused.STEPS; "torch", which is this file, on a CPU.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        device = torch.device(device)
        self.config, self.dtype, self.device = config, dtype, device
        self.step = "streamed" if device.type == "cuda" and not config.sandwiched else "torch"
        self.embedding = empty_weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers: list[Layer] = []
        for i in range(len(config.layer_types)):
            self.layers.append(Layer(config, i, dtype, device))
            self.add_module(f"layer_{i}", self.layers[i])  # a ModuleList would hide what its items are
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset, dtype, device)
        self.head = self.embedding
        if not config.tied:
            self.head = empty_weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.frequencies = torch.tensor(config.rope.frequencies, dtype=torch.float32, device=device)
        local = config.local_rope
        self.local_frequencies = self.frequencies
        if local is not None:
            self.local_frequencies = torch.tensor(local.frequencies, dtype=torch.float32, device=device)

    def parts(self) -> Iterator[Part]:
        """Every tensor of a checkpoint and where it goes."""
        yield Part("embed_tokens.weight", self.embedding)
        for i, layer in enumerate(self.layers):
            yield from layer.parts(f"layers.{i}")
        yield from self.norm.parts("norm")
        if self.head is not self.embedding:
            yield Part("lm_head.weight", self.head)

    def check(self, weights: Weights) -> list[Part]:
        """The parts, if the checkpoint has each in its shape and no others. Needs no memory on the device "meta".

        ValueError naming file and tensor otherwise.
        """
        parts = list(self.parts())
        check_names(weights, [part.name for part in parts])
        for part in parts:
            expected, got = part.shape or tuple(part.dest.shape), weights.shape(part.name)
            if part.name.endswith("conv1d.weight"):
                expected = (expected[0], 1, expected[1])
            if got != expected:
                raise ValueError(f"{weights.where(part.name)}: expected shape {expected}, got {got}")
        factors = weights.rope_factors
        if factors is not None and factors.shape != self.frequencies.shape:
            raise ValueError(
                f"{weights.source}: rope_freqs.weight: expected {self.frequencies.shape[0]} factors, "
                f"got {tuple(factors.shape)}"
            )
        return parts

    @torch.no_grad()
    def load(self, weights: Weights, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Fill from a checkpoint, whose names and shapes are all checked before the first tensor is read.

        progress: called with tensors done, in all, and a name. Raises ValueError naming file and tensor.
        """
        parts = self.check(weights)
        for i, part in enumerate(parts):
            if progress is not None:
                progress(i, len(parts), part.name)
            value = weights.read(part.name)
            part.dest.copy_((value if part.change is None else part.change(value)).reshape(part.dest.shape))
        if weights.rope_factors is not None:
            self.frequencies /= weights.rope_factors.to(self.frequencies)

    @torch.no_grad()
    def randomise(self, seed: int = 0) -> None:
        """Random weights of the size that training begins with, the same for the same seed, device and shape."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for part in self.parts():
            if part.name.endswith("norm.weight"):
                part.dest.fill_(1.0)
            elif part.name.endswith("A_log"):
                part.dest.fill_(-1.0)
            else:
                part.dest.normal_(0, 0.02, generator=generator)

    def _rotation(self, positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each [tokens, 1, pairs] f32, of positions [tokens]."""
        angles = (positions[:, None].float() * frequencies)[:, None]
        return angles.cos() * scale, angles.sin() * scale

    def _rotations(self, positions: Tensor) -> Rotations:
        rope, local = self.config.rope, self.config.local_rope
        full = self._rotation(positions, self.frequencies, rope.scale)
        return full, full if local is None else self._rotation(positions, self.local_frequencies, local.scale)

    def _embed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype).item()

    def _logits(self, x: Tensor) -> Tensor:
        logits = project(self.norm(x), self.head).float()
        cap = self.config.logits_softcap
        return logits if cap is None else (logits / cap).tanh() * cap

    @torch.no_grad()
    def prefill(self, tokens: Tensor, state: DecodeState, row: int, start: int) -> Tensor:
        """Logits [vocab_size] f32 after the last of `tokens` [n] int64, which stand at positions start, .. of a row.

        The state's lengths are the caller's to set.
        """
        rotations = self._rotations(torch.arange(start, start + tokens.shape[0], device=self.device))
        x = self._embed(tokens)
        for layer in self.layers:
            x = layer.prefill(x, rotations, state, row, start)
        return self._logits(x[-1:])[0]

    @torch.no_grad()
    def decode(self, tokens: Tensor, state: DecodeState) -> Tensor:
        """Logits [batch, vocab_size] f32 after one more token of every row; the state's lengths grow by one."""
        if self.step != "torch":
            return self._fused(tokens, state)
        rotations = self._rotations(state.seq_lens)
        state.seq_lens += 1
        x = self._embed(tokens)
        for layer in self.layers:
            x = layer.decode(x, rotations, state)
        return self._logits(x)

    def _fused(self, tokens: Tensor, state: DecodeState) -> Tensor:
        from ..backends.launching import on_device
        from .fused import FusedStep

        with on_device(tokens):
            now = FusedStep(self.step, tokens, self.embedding, self.frequencies, self.config.rope.scale, state)
            for layer in self.layers:
                layer.step(now)
            return now.products.logits(now.x, self.norm, self.head)

    def bytes_per_step(self, rows: int = 1) -> int:
        """Bytes of weights that one decode step of `rows` rows reads.

        All but an embedding that is not also the output matrix; of experts those that are chosen, which is exact for
        one row, and for more what is expected if every expert is as likely as the next.
        """
        return self._bytes_read(lambda mixture: mixture.experts.expected_read(rows))

    def bytes_of_step(self, tokens: Tensor, state: DecodeState) -> int:
        """The same for one more token of every row, with the experts that are really chosen.

        With experts and several rows this does the step, in torch, and waits for it; the state moves on.
        """
        mixtures = [layer.experts for layer in self.layers if layer.experts is not None]
        if not mixtures or tokens.shape[0] == 1:
            return self.bytes_per_step()
        step, self.step = self.step, "torch"
        for mixture in mixtures:
            mixture.counted = []
        try:
            self.decode(tokens, state)
            return self._bytes_read(lambda mixture: sum(mixture.counted or []))
        finally:
            self.step = step
            for mixture in mixtures:
                mixture.counted = None

    def _bytes_read(self, experts_read: Callable[[ExpertMLP], float]) -> int:
        weights = {id(p): p.numel() * p.element_size() for p in self.parameters()}
        if self.head is not self.embedding:
            weights.pop(id(self.embedding))
        read = 0
        for layer in self.layers:
            if layer.experts is not None:
                read += layer.experts.bytes_read(experts_read(layer.experts))
                for p in layer.experts.parameters():
                    weights.pop(id(p))
        return read + sum(weights.values())
