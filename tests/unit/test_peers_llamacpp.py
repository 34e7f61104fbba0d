"""llama.cpp's CPU attention as a contender: the right keys, scale and layout, held against float64.

Skipped where llama-cpp-python is not installed.
"""

import pytest

from splitkv.bench import parity
from splitkv.bench.attention_cases import AttentionCase
from splitkv.bench.attention_data import CaseTensors, KVArena, arena_elements
from splitkv.bench.peers import CONTENDERS
from splitkv.bench.timing import Rotation

LLAMACPP = CONTENDERS["llama.cpp"]
SETS = 3
CASES = {
    "f32": (AttentionCase("x", 1, 16, 4, 64, 600, "f32"), 1e-6),
    "f16": (AttentionCase("x", 1, 16, 4, 64, 600, "f16"), 2e-2),
    "bf16": (AttentionCase("x", 1, 14, 2, 64, 333, "bf16"), 1e-2),
    "rows": (AttentionCase("x", 3, 8, 2, 128, 150, "f32"), 1e-6),
    "192/128": (AttentionCase("x", 1, 4, 2, 192, 90, "f32", v_head_dim=128), 1e-6),
}


@pytest.mark.parametrize("name", CASES)
def test_it_attends_to_each_set(name: str) -> None:
    pytest.importorskip("llama_cpp")
    case, limit = CASES[name]
    rotation = Rotation(SETS, SETS * case.set_keys * case.key_bytes, cold=True)
    tensors = CaseTensors(case, rotation, KVArena(*arena_elements(case, rotation), case.kv_dtype, "cpu", 0))
    call = LLAMACPP.make(tensors)
    assert LLAMACPP.unable(case) is None
    for i in range(SETS):
        k, v = tensors.valid_rows(i)
        exact = parity.float64_attention(tensors.q, k, v)
        out = call(i)
        assert out.shape == tensors.out_shape and parity.error_of(out, exact).relative <= limit


REFUSED = {
    "fp8": AttentionCase("x", 1, 4, 2, 32, 150, "fp8_e4m3"),
    "ragged": AttentionCase("x", 3, 4, 2, 32, 90, "bf16", page_size=16, lens=(90, 5, 33)),
    "pages": AttentionCase("x", 1, 4, 2, 32, 150, "bf16", page_size=64),
    "queries": AttentionCase("x", 2, 4, 2, 32, 150, "bf16", q_len=4),
    "capacity": AttentionCase("x", 1, 4, 2, 32, 150, "bf16", capacity=4096),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_run_has_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitkv.bench.peers_llamacpp.installed", lambda module: True)
    assert LLAMACPP.unable(REFUSED[name])


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitkv.bench.peers_llamacpp.installed", lambda module: False)
    assert LLAMACPP.unable(CASES["f16"][0]) == "llama-cpp-python is not installed"
