"""Mixtures of experts beside the models: layouts of files, many tokens at once, what a step reads, bad configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, SIZES, make, save

from splitkv import UnsupportedError
from splitkv.cache.models import model_from_config
from splitkv.models import latent
from splitkv.models.config import DecoderConfig, Experts
from splitkv.models.decoder import Decoder
from splitkv.models.loading import open_model
from splitkv.models.moe import ExpertMLP
from splitkv.models.state import DecodeState

AutoConfig = pytest.importorskip("transformers").AutoConfig
WITH_EXPERTS = ("qwen3_moe", "qwen3_5_moe", "deepseek_v2")


def stack(folder: Path) -> None:
    """Rewrite a checkpoint with one file per expert's matrix so that each layer's experts are two tensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    mixtures = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for mixture in mixtures:
        count = sum(name.startswith(f"{mixture}.experts.") for name in tensors) // 3
        each = {
            part: torch.stack([tensors.pop(f"{mixture}.experts.{i}.{part}_proj.weight") for i in range(count)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{mixture}.experts.gate_up_proj"] = torch.cat([each["gate"], each["up"]], 1)
        tensors[f"{mixture}.experts.down_proj"] = each["down"]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_stacked_experts_are_the_same_model(family: str, tmp_path: Path) -> None:
    model = make(family)
    apart = open_model(save(model, tmp_path / "apart")).load(torch.float32, "cpu")
    stack(save(model, tmp_path / "stacked"))
    stacked = open_model(tmp_path / "stacked").load(torch.float32, "cpu")
    for ours, expected in zip(stacked.parts(), apart.parts(), strict=True):
        assert ours.name == expected.name and torch.equal(ours.dest, expected.dest), ours.name


def test_a_stack_of_another_size_is_named(tmp_path: Path) -> None:
    stack(save(make("qwen3_5_moe"), tmp_path / "m"))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for changes, message in (
        ({"num_experts": 7}, r"layers\.0\.mlp\.experts\.7\.down_proj\.weight: expected no such tensor"),
        ({"num_experts": 9}, r"layers\.0\.mlp\.experts\.8\.down_proj\.weight: expected this tensor"),
        (
            {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 48},
            r"model\.safetensors: .*experts\.gate_up_proj: expected shape \(16, 64\), got \(24, 64\)",
        ),
    ):
        (tmp_path / "m" / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=message):
            open_model(tmp_path / "m").load(torch.float32, "cpu")


def mixture(dtype: torch.dtype, experts: Experts | None = None) -> ExpertMLP:
    made = ExpertMLP(
        experts or Experts(16, 4, 40, 2, True, True, 1.0, 1, 1, frozenset()), 64, dtype, torch.device("cpu")
    )
    draw = torch.Generator().manual_seed(3)
    for weight in made.parameters():
        weight.normal_(0, 0.2, generator=draw)
    return made


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_grouped_products_are_the_same(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    """The way of many tokens on a GPU, which torch can go on a CPU too; with experts that nobody chose."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped product")
    layer = mixture(dtype)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    routed = layer.route(x)
    expected = layer.one_by_one(x, *routed).float()
    assert (layer.grouped(x, *routed).float() - expected).abs().max() < tolerance * expected.abs().max()


def test_experts_that_a_step_is_expected_to_read() -> None:
    """Two shared; of 16 even ones 4 for one row, and all of them for many."""
    experts = mixture(torch.float32).experts
    assert experts.expected_read(1) == 6.0 and experts.expected_read(2) == 2 + 4 + 4 * 12 / 16
    assert 17.9 < experts.expected_read(64) < 18
    draw = torch.Generator().manual_seed(4)
    pairs = [{*torch.randperm(16, generator=draw)[:4].tolist(), *torch.randperm(16, generator=draw)[:4].tolist()}
             for _ in range(2000)]  # fmt: skip
    assert sum(map(len, pairs)) / 2000 == pytest.approx(experts.expected_read(2) - 2, rel=0.02)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_the_experts_really_chosen_are_counted(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(DecoderConfig.from_config(make(family).config.to_dict(), family), torch.float32, "cpu")
    decoder.randomise(1)
    chosen: list[set[int]] = []
    real = ExpertMLP.one_by_one

    def noted(layer: ExpertMLP, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        chosen.append(set(ids.flatten().tolist()))
        return real(layer, x, weights, ids)

    monkeypatch.setattr(ExpertMLP, "one_by_one", noted)
    state = DecodeState(decoder.config, 3, 8, "f32", torch.float32, "cpu")
    counted = decoder.bytes_of_step(torch.tensor([3, 4, 5]), state)
    mixtures = [layer.experts for layer in decoder.layers if layer.experts is not None]
    unread = sum(len(m.gate_up) - len(ids) for m, ids in zip(mixtures, chosen, strict=True)) * 3 * 24 * 64 * 4
    assert unread > 0 and counted == decoder.bytes_per_step(10_000) - unread
    assert state.seq_lens.tolist() == [1, 1, 1]
    assert decoder.bytes_of_step(torch.tensor([3]), state) == decoder.bytes_per_step()


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_the_decoder_counts_what_a_step_reads(family: str) -> None:
    config = make(family).config.to_dict()
    decoder = Decoder(DecoderConfig.from_config(config, family), torch.bfloat16, "meta")
    idle = sum(
        (layer.experts.experts.count - layer.experts.experts.chosen) * 3 * 24 * 64 * 2
        for layer in decoder.layers
        if layer.experts is not None
    )
    everything = sum(p.numel() * p.element_size() for p in decoder.parameters())
    embedding = decoder.embedding.numel() * 2
    assert idle > 0 and decoder.bytes_per_step() == everything - embedding - idle
    assert decoder.bytes_per_step(10_000) == everything - embedding


@pytest.mark.parametrize("family", FAMILIES)
def test_the_capacity_check_counts_every_weight(family: str) -> None:
    config = make(family).config.to_dict() | {"dtype": "float32"}
    decoder = Decoder(DecoderConfig.from_config(config, family), torch.float32, "meta")
    assert model_from_config(config).parameters == sum(p.numel() for p in decoder.parameters())


BAD: dict[str, tuple[str, dict[str, Any], type[ValueError], str]] = {
    "too many chosen": ("qwen3_moe", {"num_experts_per_tok": 9}, ValueError, "at most 8 experts, got 9"),
    "chosen missing": ("deepseek_v2", {"num_experts_per_tok": None}, ValueError, "num_experts_per_tok: expected an"),
    "shared of another width": (
        "qwen3_5_moe", {"shared_expert_intermediate_size": 36}, UnsupportedError,
        r"shared_expert_intermediate_size: expected a multiple of 24 \(the other experts'\), got 36",
    ),
    "groups": ("deepseek_v2", {"n_group": 3}, ValueError, "n_group: expected a divisor of 8 experts, got 3"),
    "few groups": ("deepseek_v2", {"topk_group": 1}, ValueError, "topk_group: expected up to 4 groups, with 3 experts"),
    "method": ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedError, "topk_method: expected greedy or group"),
    "sigmoid": ("deepseek_v2", {"scoring_func": "sigmoid"}, UnsupportedError, "scoring_func: expected 'softmax'"),
    "normalised": ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedError, "norm_topk_prob: expected False"),
    "gelu": ("gemma3", {"hidden_activation": "gelu"}, UnsupportedError, "hidden_activation: expected 'gelu_pytorch"),
    "both ways": ("gemma3", {"use_bidirectional_attention": True}, UnsupportedError, "use_bidirectional_attention"),
    "local rope": (
        "gemma3", {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "magic"}}},
        UnsupportedError, r"rope_parameters\.sliding_attention\.rope_type: expected one of default",
    ),
    "softcap": ("gemma2", {"attn_logit_softcapping": -1}, ValueError, "attn_logit_softcapping: expected a number"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_configs_that_are_not_built(case: str) -> None:
    family, changes, error, message = BAD[case]
    config = make(family).config.to_dict() | changes
    with pytest.raises(error, match=message):
        DecoderConfig.from_config(config, "config.json")


def as_published(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """The same config in the words of the published files, which are older than transformers 5."""
    rope = config.pop("rope_parameters")
    if family == "gemma3":
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"):
            config.pop(name)
        config.pop("layer_types")
        config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
        config["rope_scaling"] = {"factor": rope["full_attention"]["factor"], "rope_type": "linear"}
        return {"model_type": "gemma3", "text_config": config, "vision_config": {}}
    config |= {"rope_theta": rope.pop("rope_theta"), "scoring_func": "softmax", "moe_layer_freq": 1}
    rope["type"] = rope.pop("rope_type")
    return config | {"rope_scaling": rope, "head_dim": None}


@pytest.mark.parametrize("family", ["deepseek_v2", "gemma3"])
def test_published_configs_say_the_same(family: str) -> None:
    changes = {} if family == "deepseek_v2" else {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "layer_types": None, "num_hidden_layers": 7,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "gemma3_text" if family == "gemma3" else family, **{**SIZES, **FAMILIES[family], **changes}
    ).to_dict()
    expected = DecoderConfig.from_config(dict(config), "config.json")
    assert DecoderConfig.from_config(as_published(family, config), "config.json") == expected
    if family == "gemma3":
        assert expected.layer_types == ("sliding_attention",) * 5 + ("full_attention", "sliding_attention")


@pytest.mark.parametrize(
    ("text", "head", "vision"),
    [
        ("language_model.model.", "language_model.lm_head.", "vision_tower.vision_model."),
        ("model.language_model.", "lm_head.", "model.multi_modal_projector."),
    ],
)
def test_the_text_part_of_a_model_that_sees(text: str, head: str, vision: str, tmp_path: Path) -> None:
    """Gemma 3's published names, older and newer, beside tensors of its vision part."""
    from safetensors.torch import load_file, save_file

    model = make("gemma3", tie_word_embeddings=False)
    expected = open_model(save(model, tmp_path / "m")).load(torch.float32, "cpu")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    renamed = {
        name.replace("model.", text, 1) if name.startswith("model.") else name.replace("lm_head.", head): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed | {f"{vision}weight": torch.zeros(3)}, file)
    found = open_model(tmp_path / "m").load(torch.float32, "cpu")
    for ours, theirs in zip(found.parts(), expected.parts(), strict=True):
        assert ours.name == theirs.name and torch.equal(ours.dest, theirs.dest), ours.name


def test_latents_are_expanded_for_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(DecoderConfig.from_config(make("deepseek_v2").config.to_dict(), "m"), torch.float32, "cpu")
    decoder.randomise(2)
    made = []
    real = latent.chunk_attention
    monkeypatch.setattr(latent, "chunk_attention", lambda q, *rest: made.append(q.shape[1]) or real(q, *rest))
    logits = {}
    for limit in (latent.EXPANDED_BYTES, 3 * 2 * 72 * 30 * 4, 1):
        monkeypatch.setattr(latent, "EXPANDED_BYTES", limit)
        state = DecodeState(decoder.config, 1, 30, "f32", torch.float32, "cpu")
        logits[limit] = decoder.prefill(torch.arange(30), state, 0, 0)
    assert made == [4] * 4 + [3, 1] * 4 + [1] * 16
    first, *others = logits.values()
    assert all((other - first).abs().max() < 1e-5 * first.abs().max() for other in others)
