"""The decode loop on a GPU: a step captured with an empty cache is right at every length, and equals the CPU's."""

from __future__ import annotations

import pytest
import torch

from splitkv.models.config import DecoderConfig
from splitkv.models.decoder import Decoder
from splitkv.models.loop import DecodeLoop
from splitkv.models.sampling import Sampler
from splitkv.models.state import DecodeState

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
"""All are chosen: which are is test_experts_gpu.py's, and in bf16 a near tie may fall either way."""
UNTIED = {"tie_word_embeddings": False}  # with large random embeddings a tied model says its input again
MODELS = {
    "qwen3": SIZES | {"model_type": "qwen3"},
    "qwen3_5": SIZES | {"model_type": "qwen3_5_text"} | DELTA,
    "qwen3_5_moe": SIZES | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 256} | DELTA | EXPERTS,
    "deepseek_v2": SIZES | EXPERTS | {
        "model_type": "deepseek_v2", "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 4,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "max_position_embeddings": 4096,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024, "mscale": 0.7,
                         "mscale_all_dim": 0.7},
    },
    "gemma2": SIZES | UNTIED | {"model_type": "gemma2", "sliding_window": 100},
    "gemma3": SIZES | UNTIED | {"model_type": "gemma3_text", "sliding_window": 100, "sliding_window_pattern": 2},
}  # fmt: skip
CAPACITY, NEW = 700, 24
PROMPTS = (list(range(1, 301)), list(range(40, 131)))


@pytest.fixture(scope="module")
def decoders() -> dict[tuple[str, str, str], Decoder]:
    """By model, dtype and device; the CPU has the GPU's weights, as f32."""
    made = {}
    for name, config in MODELS.items():
        for dtype in (torch.float32, torch.bfloat16):
            gpu = Decoder(DecoderConfig.from_config(dict(config), name), dtype, "cuda")
            gpu.randomise(5)
            for weight in gpu.parameters():  # at the size that training begins with, no token depends on another
                weight *= 4 if weight.ndim > 1 else 1
            cpu = Decoder(gpu.config, torch.float32, "cpu")
            for ours, theirs in zip(cpu.parameters(), gpu.parameters(), strict=True):
                ours.copy_(theirs)
            made[name, str(dtype), "cuda"], made[name, str(dtype), "cpu"] = gpu, cpu
    return made


def loop(
    decoder: Decoder, kv_dtype: str, rows: int = 2, sampler: Sampler | None = None, graph: bool | None = None
) -> DecodeLoop:
    state = DecodeState(decoder.config, rows, CAPACITY, kv_dtype, decoder.dtype, decoder.device)
    return DecodeLoop(decoder, state, sampler, graph)


def continued(made: DecodeLoop, count: int = NEW) -> list[list[int]]:
    for row, prompt in enumerate(PROMPTS[: made.state.batch]):
        made.prefill(prompt, row, chunk=128)
    return list(made.generate(count))


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "fp8_e4m3"])
@pytest.mark.parametrize("model", MODELS)
def test_the_graph_gives_the_eager_steps_tokens(
    model: str, kv_dtype: str, decoders: dict[tuple[str, str, str], Decoder]
) -> None:
    decoder = decoders[model, "torch.bfloat16", "cuda"]
    eager, graph = loop(decoder, kv_dtype, graph=False), loop(decoder, kv_dtype)
    expected = continued(eager)
    assert continued(graph) == expected and len({tuple(tokens) for tokens in expected}) > 4
    assert graph.state.seq_lens.tolist() == [len(prompt) + NEW - 1 for prompt in PROMPTS]
    for layer, cache in eager.state.caches.items():
        for row, prompt in enumerate(PROMPTS):
            held = slice(0, len(prompt) + NEW - 1)
            for name in ("k_cache", "v_cache"):
                ours, theirs = (
                    getattr(c, name)[row, held].view(torch.uint8) for c in (graph.state.caches[layer], cache)
                )
                assert torch.equal(ours, theirs)
    for layer, memory in eager.state.memory.items():
        assert torch.equal(graph.state.memory[layer], memory)
    assert continued(graph) == expected  # rows are filled again, the same graph is replayed


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_cpus(
    model: str, dtype: torch.dtype, tolerance: float, decoders: dict[tuple[str, str, str], Decoder]
) -> None:
    """Against f32 on the CPU, relative to the logits' size, over prefill in chunks and steps on given tokens."""
    ids = PROMPTS[0]
    found = {}
    for device in ("cuda", "cpu"):
        decoder = decoders[model, str(dtype), device]
        made = loop(decoder, "f32" if device == "cpu" else {torch.float32: "f32"}.get(dtype, "bf16"), 1, graph=False)
        logits = [made.prefill(ids, chunk=128)]
        for token in range(20):
            given = torch.tensor([token], device=decoder.device)
            logits.append(decoder.decode(given, made.state)[0])
        found[device] = torch.stack([row.cpu() for row in logits])
    assert (found["cuda"] - found["cpu"]).abs().max() < tolerance * found["cpu"].abs().max()


def test_draws_in_a_graph_follow_the_seed(decoders: dict[tuple[str, str, str], Decoder]) -> None:
    decoder = decoders["qwen3", "torch.bfloat16", "cuda"]

    def draws(seed: int, graph: bool) -> list[list[int]]:
        return continued(loop(decoder, "bf16", sampler=Sampler(1.0, 0.95, seed, "cuda"), graph=graph))

    first = draws(3, True)
    assert draws(3, True) == first != draws(4, True)
    assert len({tuple(tokens) for tokens in first}) > NEW // 2  # a new draw at each replay


def test_a_step_does_not_wait_for_the_host(decoders: dict[tuple[str, str, str], Decoder]) -> None:
    made = loop(decoders["qwen3_5", "torch.bfloat16", "cuda"], "bf16")
    continued(made, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.step()
        made._step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one(decoders: dict[tuple[str, str, str], Decoder]) -> None:
    here = decoders["qwen3_5", "torch.bfloat16", "cuda"]
    there = Decoder(here.config, torch.bfloat16, "cuda:1")
    for ours, theirs in zip(there.parameters(), here.parameters(), strict=True):
        ours.copy_(theirs)
    assert continued(loop(there, "bf16")) == continued(loop(here, "bf16"))


def test_one_graph_at_262144_tokens(decoders: dict[tuple[str, str, str], Decoder]) -> None:
    decoder = decoders["qwen3_5", "torch.bfloat16", "cuda"]
    state = DecodeState(decoder.config, 1, 262_144, "bf16", decoder.dtype, decoder.device)
    made = DecodeLoop(decoder, state)
    prompt = [i * 7919 % 512 for i in range(262_144 - NEW)]
    made.prefill(prompt)
    graph = list(made.generate(NEW))
    eager = DecodeLoop(decoder, state, graph=False)
    eager.prefill(prompt)
    assert list(eager.generate(NEW)) == graph
