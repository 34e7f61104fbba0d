"""Model geometry from config.json and GGUF files: published models, and files that are wrong."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitkv.cache.memory import AttentionLayers
from splitkv.cache.models import MODEL_TYPES, WEIGHT_BITS, model_from_config, read_model

# ---- published configs -------------------------------------------------------------------------------------


def qwen35(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, values: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_text", "dtype": "bfloat16", "vocab_size": 248_320, "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_num_value_heads": values, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4, "max_position_embeddings": 262_144, "tie_word_embeddings": tied,
        "mtp_num_hidden_layers": 1,
    }  # fmt: skip


def dense(kind: str, layers: int, hidden: int, ffn: int, heads: str, vocab: int, **more: Any) -> dict[str, Any]:
    q, kv = map(int, heads.split("/"))
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": q, "num_key_value_heads": kv, "vocab_size": vocab, **more,
    }  # fmt: skip


QWEN35_9B = qwen35(32, 4096, 12288, 16, 4, 32, False)
DEEPSEEK_V2_LITE = dense(
    "deepseek_v2", 27, 2048, 10944, "16/16", 102_400, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
    first_k_dense_replace=1, max_position_embeddings=163_840, torch_dtype="bfloat16",
)  # fmt: skip
QWEN25 = dense(
    "qwen2", 24, 896, 4864, "14/2", 151_936, tie_word_embeddings=True, use_sliding_window=False,
    sliding_window=32_768, max_window_layers=24, max_position_embeddings=32_768,
)  # fmt: skip
GEMMA3_1B = dense("gemma3_text", 26, 1152, 6912, "4/1", 262_144, head_dim=256, sliding_window=512)

# Parameters: the published counts of these models, exact; Qwen3.5's are transformers' own count to three digits.
PUBLISHED = [
    ("Qwen3.5-0.8B", qwen35(24, 1024, 3584, 8, 2, 16, True), 0.752e9, 12_288),
    ("Qwen3.5-4B", qwen35(32, 2560, 9216, 16, 4, 32, True), 4.21e9, 32_768),
    ("Qwen3.5-9B", QWEN35_9B, 8.95e9, 32_768),
    ("Qwen3.5-27B", qwen35(64, 5120, 17408, 24, 4, 48, False), 26.9e9, 65_536),
    ("Qwen2.5-0.5B", QWEN25, 494_032_768, 12_288),
    ("Llama-3.1-8B", dense("llama", 32, 4096, 14336, "32/8", 128_256), 8_030_261_248, 131_072),
    ("SmolLM2-135M", dense("llama", 30, 576, 1536, "9/3", 49_152, tie_word_embeddings=True), 134_515_008, 23_040),
    (
        "Qwen3-0.6B",
        dense("qwen3", 28, 1024, 3072, "16/8", 151_936, head_dim=128, tie_word_embeddings=True),
        596_049_920,
        114_688,
    ),
    (
        "Qwen3-30B-A3B",
        dense("qwen3_moe", 48, 2048, 6144, "32/4", 151_936, head_dim=128, num_experts=128, moe_intermediate_size=768),
        30_532_122_624,
        98_304,
    ),
    (
        "gemma-2-2b",
        dense("gemma2", 26, 2304, 9216, "8/4", 256_000, head_dim=256, sliding_window=4096),
        2_614_341_888,
        106_496,
    ),
    ("gemma-3-1b", GEMMA3_1B, 999_885_952, 26_624),
    ("DeepSeek-V2-Lite", DEEPSEEK_V2_LITE, 15_706_484_224, 31_104),
]


@pytest.mark.parametrize(("config", "parameters", "kv_bytes"), [case[1:] for case in PUBLISHED], ids=lambda x: "")
def test_published_models(config: dict[str, Any], parameters: float, kv_bytes: int) -> None:
    model = model_from_config(config)
    exact = isinstance(parameters, int)
    assert model.parameters == parameters if exact else model.parameters == pytest.approx(parameters, rel=2e-3)
    assert model.weights_bytes == 2 * model.parameters
    assert model.kv_bytes_per_token("f16") == kv_bytes
    assert model.max_context == config.get("max_position_embeddings")


def test_hybrids_count_full_attention_and_the_recurrent_state() -> None:
    model = model_from_config(QWEN35_9B)
    assert model.attention == (AttentionLayers(8, 4, 256),) and model.num_q_heads == 16
    # 24 layers of 32 heads x 128 x 128 in f32, and 4 inputs of 8,192 channels in bf16.
    assert model.state_bytes == 24 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)
    named = {**QWEN35_9B, "layer_types": ["linear_attention"] * 30 + ["full_attention"] * 2}
    assert model_from_config(named).attention == (AttentionLayers(2, 4, 256),)


def test_a_moe_hybrid() -> None:
    config = qwen35(40, 2048, 0, 16, 2, 32, False) | {"model_type": "qwen3_5_moe_text", "num_experts": 256}
    model = model_from_config(config | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512})
    assert model.parameters == pytest.approx(34.7e9, rel=2e-3) and model.kv_bytes_per_token("f16") == 20_480


def test_a_vision_model_is_its_text_part() -> None:
    whole = {"model_type": "qwen3_5", "text_config": QWEN35_9B, "vision_config": {"depth": 27}}
    model = model_from_config(whole)
    assert model.parameters == model_from_config(QWEN35_9B).parameters
    assert model.notes == ("the vision part's weights are not counted",)


def test_latent_attention_latent_or_expanded() -> None:
    assert model_from_config(DEEPSEEK_V2_LITE).attention == (AttentionLayers(27, 1, 576, 512, v_in_k=True),)
    expanded = model_from_config(DEEPSEEK_V2_LITE, expanded=True)
    assert expanded.attention == (AttentionLayers(27, 16, 192, 128),)
    assert expanded.kv_bytes_per_token("f16") == 276_480


def test_windows() -> None:
    assert model_from_config(GEMMA3_1B).attention == (
        AttentionLayers(4, 1, 256),
        AttentionLayers(22, 1, 256, window=512),
    )
    types = ["sliding_attention", "full_attention"] * 13
    named = model_from_config(GEMMA3_1B | {"layer_types": types})
    assert [(group.layers, group.window) for group in named.attention] == [(13, None), (13, 512)]
    windowed = QWEN25 | {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 4096}
    assert [(g.layers, g.window) for g in model_from_config(windowed).attention] == [(20, None), (4, 4096)]
    assert model_from_config(QWEN25).attention[0].window is None
    mistral = dense("mistral", 32, 4096, 14336, "32/8", 32_000, sliding_window=4096)
    assert model_from_config(mistral).attention == (AttentionLayers(32, 8, 128, window=4096),)
    assert model_from_config(mistral | {"sliding_window": None}).attention == (AttentionLayers(32, 8, 128),)


def test_gemma3_published_with_only_its_differences() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    model = model_from_config({"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}})
    assert model.attention == (AttentionLayers(5, 4, 256), AttentionLayers(29, 4, 256, window=1024))


def test_weights() -> None:
    parameters = model_from_config(QWEN25).parameters
    assert model_from_config(QWEN25 | {"torch_dtype": "float32"}).weights_bytes == 4 * parameters
    assert model_from_config(QWEN25, weights_dtype=" Q8_0 ").weights_bytes == parameters * 17 // 16
    assert model_from_config(QWEN25, weights_bytes=5).weights_bytes == 5
    fp8 = QWEN25 | {"quantization_config": {"quant_method": "fp8"}}
    assert model_from_config(fp8).weights_bytes == parameters
    four_bits = QWEN25 | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    with pytest.raises(ValueError, match="config: quantization_config: expected fp8 or none; .*--weights"):
        model_from_config(four_bits)
    assert model_from_config(four_bits, weights_dtype="q4_0").weights_bytes == -(-parameters * 9 // 16)
    with pytest.raises(ValueError, match=f"weights_dtype: expected one of {', '.join(WEIGHT_BITS)}, got 'int3'"):
        model_from_config(QWEN25, weights_dtype="int3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "rwkv"}, f"model_type: expected one of {', '.join(MODEL_TYPES)}, got 'rwkv'"),
        ({"model_type": None}, "model_type: expected a text, got None"),
        ({"hidden_size": "896"}, "hidden_size: expected an integer of at least 1, got '896'"),
        ({"hidden_size": None}, "hidden_size: expected an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected an integer of at least 1, got 0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: expected at most 10000"),
        ({"num_attention_heads": True}, "num_attention_heads: expected an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 14 query heads, got 3"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected a list of 24 names"),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types: expected full_attention, sliding_attention"),
        ({"torch_dtype": "int8"}, "torch_dtype: expected one of float32"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings: expected an integer"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN25 | change))
    with pytest.raises(ValueError) as error:
        read_model(tmp_path)
    assert str(error.value).startswith(f"{file}: ") and message in str(error.value)


def test_a_missing_field_is_named() -> None:
    config = {name: value for name, value in QWEN25.items() if name != "vocab_size"}
    with pytest.raises(ValueError, match="config: vocab_size: expected an integer of at least 1, and it is missing"):
        model_from_config(config)
    with pytest.raises(ValueError, match=r"config: text_config\.hidden_size: "):
        model_from_config({"model_type": "llama", "text_config": {"model_type": "llama"}})


# ---- files -------------------------------------------------------------------------------------------------


def test_a_folder_or_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN25))
    assert read_model(tmp_path) == read_model(str(tmp_path / "config.json")) == model_from_config(QWEN25)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("the file was unpickled",))


@pytest.mark.parametrize(
    "contents",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, pickle.dumps(Bomb())],
    ids=["empty", "cut", "not text", "deep", "pickle"],
)
def test_a_file_of_another_kind(contents: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(contents)
    with pytest.raises(ValueError, match=rf"{file}: expected JSON \(config.json\) or GGUF, and it is neither"):
        read_model(file)


def test_what_is_not_there_or_not_an_object(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model: expected a config.json, .*config.json is not there"):
        read_model(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("[1]")
    with pytest.raises(ValueError, match=f"{file}: expected a JSON object, got list"):
        read_model(file)
    file.write_bytes(b" " * (16 << 20) + b"{}")
    with pytest.raises(ValueError, match="expected a config.json of at most 16777216 bytes"):
        read_model(file)


# ---- GGUF --------------------------------------------------------------------------------------------------

QWEN35_GGUF = {
    "block_count": 32, "context_length": 262_144, "embedding_length": 4096, "attention.head_count": 16,
    "attention.head_count_kv": 4, "attention.key_length": 256, "attention.value_length": 256,
    "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16,
    "ssm.time_step_rank": 32, "ssm.inner_size": 4096,
}  # fmt: skip


def write_gguf(file: Path, arch: str, values: dict[str, Any], **top: int) -> Path:
    """A GGUF file with these metadata and 64 f32 and 64 q8_0 weights (256 and 68 bytes)."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, arch)
    for name, value in values.items():
        if isinstance(value, list):
            writer.add_array(f"{arch}.{name}", value)
        else:
            writer.add_uint32(f"{arch}.{name}", value)
    for name, value in top.items():
        writer.add_uint16(name.replace("_", "."), value)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    packed = gguf.quants.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_gguf_hybrid(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "qwen35", QWEN35_GGUF)
    model, config = read_model(file), model_from_config(QWEN35_9B)
    assert (model.attention, model.state_bytes, model.num_q_heads) == (config.attention, config.state_bytes, 16)
    assert (model.parameters, model.weights_bytes, model.max_context) == (128, 256 + 68, 262_144)
    assert read_model(file, weights_dtype="f32").weights_bytes == 512
    assert read_model(file, weights_bytes=9).weights_bytes == 9
    nameless = file.rename(tmp_path / "blob")  # told by its first bytes
    assert read_model(nameless).attention == config.attention
    more = write_gguf(tmp_path / "mtp.gguf", "qwen35", QWEN35_GGUF | {"block_count": 33, "nextn_predict_layers": 1})
    assert read_model(more).attention == config.attention


@pytest.mark.parametrize(
    ("arch", "values", "expected"),
    [
        (
            "llama",
            {"block_count": 30, "embedding_length": 576, "attention.head_count": 9, "attention.head_count_kv": 3},
            (AttentionLayers(30, 3, 64),),
        ),
        (
            "qwen35",
            QWEN35_GGUF | {"attention.head_count_kv": [0, 0, 0, 4] * 8},
            (AttentionLayers(8, 4, 256),),
        ),
        (
            "gemma3",
            {
                "block_count": 26, "embedding_length": 1152, "attention.head_count": 4, "attention.head_count_kv": 1,
                "attention.key_length": 256, "attention.sliding_window": 512,
            },
            (AttentionLayers(4, 1, 256), AttentionLayers(22, 1, 256, window=512)),
        ),
        (
            "deepseek2",
            {
                "block_count": 27, "attention.head_count": 16, "attention.head_count_kv": 1,
                "attention.kv_lora_rank": 512, "attention.key_length": 576, "attention.value_length": 512,
                "attention.key_length_mla": 192, "attention.value_length_mla": 128, "rope.dimension_count": 64,
            },
            (AttentionLayers(27, 1, 576, 512, v_in_k=True),),
        ),
    ],
)  # fmt: skip
def test_gguf_layers(arch: str, values: dict[str, Any], expected: tuple[AttentionLayers, ...], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", arch, values)
    assert read_model(file).attention == expected
    if arch == "deepseek2":
        assert read_model(file, expanded=True).attention == (AttentionLayers(27, 16, 192, 128),)


def test_gguf_in_several_files(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", "qwen35", QWEN35_GGUF, split_count=2, split_no=0)
    second = write_gguf(tmp_path / "m-00002-of-00002.gguf", "qwen35", {}, split_count=2, split_no=1)
    assert read_model(first).weights_bytes == 2 * (256 + 68)
    with pytest.raises(ValueError, match=f"{second}: split.count: expected the first of 2 files"):
        read_model(second)
    second.unlink()
    with pytest.raises(ValueError, match=f"{second}: expected a complete GGUF file"):
        read_model(first)


def test_gguf_faults_name_the_file_and_the_field(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "qwen35", {k: v for k, v in QWEN35_GGUF.items() if k != "ssm.group_count"})
    with pytest.raises(ValueError, match=f"{file}: qwen35.ssm.group_count: expected an integer .* it is missing"):
        read_model(file)
    whole = file.read_bytes()
    for size in (4, 20, 100, len(whole) // 2, len(whole) - 200):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{file}: expected a complete GGUF file"):
            read_model(file)
    other = write_gguf(tmp_path / "o.gguf", "rwkv7", {})
    with pytest.raises(ValueError, match=f"{other}: general.architecture: expected one of llama, .* got 'rwkv7'"):
        read_model(other)


def test_without_the_gguf_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=rf"{file}: .*pip install 'splitkv\[models\]'"):
        read_model(file)
