"""The longest prompt that fits in each KV type, for published models: figures worked out by hand, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_models import DEEPSEEK_V2_LITE, GEMMA3_1B, PUBLISHED, QWEN25, QWEN35_9B

from splitkv import plan_decode, plan_memory
from splitkv.bench.fitting import attention_workspace, make_fit, notes
from splitkv.cache.models import model_from_config
from splitkv.problem import KNOWN_DEVICES, MAX_CONTEXT, MIB, DecodeProblem

GIB = 1024 * MIB
CONFIGS = {name: config for name, config, *_ in PUBLISHED}
# Each: (free - weights - states - 512 MiB) / bytes per token, rounded down, less the token being computed, at most
# 262,144; with a window of W tokens, W x bytes per token of its layers go off first. Workspace 0.
# Qwen3.5-9B q4_k_m: 14,680,064,000 - 5,417,050,975 - 51,904,512 - 536,870,912 = 8,674,237,601; / 65,536 = 132,358.3
# Llama-3.1-8B bf16: 24,431,820,800 - 16,060,522,496 - 536,870,912 = 7,834,427,392; / 262,144 = 29,885.97
# gemma-2-2b bf16:   16,777,216,000 - 5,228,683,776 - 536,870,912 - 4,096 x 106,496; / 106,496 = 99,303.6
# DeepSeek-V2-Lite q8_0: 24,431,820,800 - 16,688,139,488 - 536,870,912 = 7,206,810,400; latent / (27 x 576 x 4) =
# 115,850.2; expanded / (27 x 16 x 320 x 4) = 13,033.3
BY_HAND: list[tuple[str, dict[str, Any], int, tuple[int, int, int]]] = [
    ("Qwen3.5-9B", {"weights_dtype": "q4_k_m"}, 14_000 * MIB, (132_357, MAX_CONTEXT, MAX_CONTEXT)),
    ("Qwen3.5-27B", {"weights_dtype": "q4_k_m"}, 23_300 * MIB, (56_974, 113_950, 227_902)),
    ("Qwen2.5-0.5B", {}, 4 * GIB, (112_711, 225_424, MAX_CONTEXT)),
    ("Llama-3.1-8B", {}, 23_300 * MIB, (29_884, 59_770, 119_542)),
    ("gemma-2-2b", {}, 16_000 * MIB, (99_302, 202_702, MAX_CONTEXT)),
    ("gemma-3-1b", {}, 3 * GIB, (80_750, 164_317, MAX_CONTEXT)),
    ("DeepSeek-V2-Lite", {"weights_dtype": "q8_0"}, 23_300 * MIB, (115_849, 231_699, MAX_CONTEXT)),
    ("DeepSeek-V2-Lite", {"weights_dtype": "q8_0", "expanded": True}, 23_300 * MIB, (13_032, 26_065, 52_131)),
]


@pytest.mark.parametrize(("name", "options", "free", "largest"), BY_HAND, ids=lambda x: x if isinstance(x, str) else "")
def test_by_hand(name: str, options: dict[str, Any], free: int, largest: tuple[int, int, int]) -> None:
    f32, f16, fp8 = largest
    plan = plan_memory(model_from_config(CONFIGS[name], **options), 1, free_bytes=free)
    assert plan.largest_contexts() == {"f32": f32, "f16": f16, "bf16": f16, "fp8_e4m3": fp8, "fp8_e5m2": fp8}


def test_windows_that_keep_all_tokens() -> None:
    """What splitkv's own caches hold: 26 layers x 4 heads x 512 columns of every token."""
    model = model_from_config(CONFIGS["gemma-2-2b"])
    plan = plan_memory(model.whole(), 1, free_bytes=16_000 * MIB)
    assert plan.largest_contexts(("f32", "f16", "fp8")) == {"f32": 51_698, "f16": 103_398, "fp8": 206_798}
    assert model.windowed and not model.whole().windowed
    assert model.whole().kv_bytes_per_token("f16") == model.kv_bytes_per_token("f16")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(config: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


def test_the_command_says_what_splitkv_s_caches_hold(write: Any) -> None:
    path = write(CONFIGS["gemma-2-2b"])
    asked: dict[str, Any] = {"free": "16000MiB", "workspace": "0"}
    (note,) = notes(make_fit(path, 1000, **asked))
    assert "(--whole-windows): the longest prompts are then f32 51,698, f16 103,398, bf16 103,398, fp8_e4m3" in note
    whole = make_fit(path, 1000, whole_windows=True, **asked)
    assert notes(whole) == [] and whole.plan.largest_context("f16") == 103_398
    (note,) = notes(make_fit(write(GEMMA3_1B), 1000, free="80GiB"))
    assert note.endswith("no limit changes by it here")


def test_a_refusal_names_the_types_that_would_fit(write: Any) -> None:
    path = write(QWEN35_9B)
    asked: dict[str, Any] = {"free": "12000MiB", "weights_dtype": "q4_k_m"}
    (note,) = notes(make_fit(path, 262_144, **asked))
    assert note == "in fp8_e4m3 and fp8_e5m2 it would fit: --kv-dtypes fp8_e4m3"
    assert notes(make_fit(path, 262_144, kv_dtypes="fp8", **asked)) == []
    assert notes(make_fit(path, 262_144, free="5GiB", weights_dtype="q4_k_m")) == []


@pytest.mark.parametrize("config", [QWEN25, QWEN35_9B, DEEPSEEK_V2_LITE], ids=["qwen2.5", "qwen3.5", "deepseek"])
def test_workspace_covers_every_backend(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may be without NVRTC, so backend triton's scratch counts where cuda would run; the environment does not."""
    model = model_from_config(config)
    for batch in (1, 16, 64):
        most = attention_workspace(model, batch)
        for group in model.attention:
            sizes = (batch, model.num_q_heads, group.num_kv_heads, group.head_dim, group.v_head_dim)
            for device in KNOWN_DEVICES.values():
                for backend in ("auto", "triton"):
                    assert plan_decode(DecodeProblem(*sizes), device, backend=backend).workspace_bytes <= most
        monkeypatch.setenv("SPLITKV_BACKEND", "cuda")
        assert attention_workspace(model, batch) == most
        monkeypatch.delenv("SPLITKV_BACKEND")
