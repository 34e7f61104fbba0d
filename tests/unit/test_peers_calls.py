"""What the contenders hand to FlashInfer and FA3, held against stand-ins that do what those libraries document.

The libraries need a GPU. The stand-ins read the same pages, lists and lengths with the float64 oracle, so a wrong
list, layout, scale or mask shows as a wrong answer.
"""

import sys
from importlib.machinery import ModuleSpec
from math import ceil
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.bench import parity
from splitkv.bench.attention_cases import AttentionCase
from splitkv.bench.attention_data import CaseTensors, KVArena, arena_elements
from splitkv.bench.peers import CONTENDERS
from splitkv.bench.timing import Rotation

CASES = {
    "uniform": AttentionCase("x", 2, 4, 2, 32, 150, "bf16"),
    "ragged": AttentionCase("x", 3, 4, 2, 32, 90, "bf16", page_size=16, lens=(90, 5, 33)),
    "page 64": AttentionCase("x", 1, 4, 2, 32, 150, "bf16", page_size=64),
    "queries": AttentionCase("x", 2, 4, 2, 32, 150, "bf16", q_len=4),
    "192/128": AttentionCase("x", 1, 4, 2, 48, 150, "bf16", v_head_dim=32),
    "fp8": AttentionCase("x", 1, 4, 2, 32, 150, "fp8_e4m3"),
}
PEERS = ("flashinfer-cuda", "flashinfer-tensor", "flashinfer-xqa", "fa3", "fa3-paged")


def oracle(q: Tensor, k: Tensor, v: Tensor, lens: Any, scale: float | None, **options: Any) -> Tensor:
    """The float64 answer in bf16; q may be fp8, as FA3 takes it."""
    q, k, v = (part.to(torch.bfloat16) for part in (q, k, v))
    out = splitkv.reference_attention(q, k, v, lens, softmax_scale=scale, **options)
    assert isinstance(out, Tensor)
    return out.to(torch.bfloat16)


def fa3_stand_in(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    assert q.ndim == 4 and q.dtype == k_cache.dtype and causal == (q.shape[1] > 1)
    lens = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    return oracle(q, k_cache, v_cache, lens, softmax_scale, block_table=page_table)


class Wrapper:
    """The two paged wrappers: page lists in, one block table out of them, and the oracle."""

    def __init__(
        self, workspace: Tensor, kv_layout: str, use_tensor_cores: bool = False, backend: str = "auto"
    ) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD" and not workspace.any()

    def keep(self, indptr: Tensor, indices: Tensor, last: Tensor, page: int, kv_data_type: torch.dtype) -> None:
        counts = indptr.diff().tolist()
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for b, ids in enumerate(indices.split(counts)):
            self.table[b, : len(ids)] = ids
        self.lens = ((indptr.diff() - 1) * page + last).to(torch.int32)
        self.page, self.kv_data_type = page, kv_data_type

    def attend(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
        k, v = cache
        assert k.shape[1] == self.page and k.dtype == self.kv_data_type
        out.copy_(oracle(q, k, v, self.lens, None, block_table=self.table).reshape(out.shape))


class Decode(Wrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last: Tensor, num_q: int, num_kv: int, dim: int, page: int, **dtypes: Any
    ) -> None:
        assert dtypes["q_data_type"] == torch.bfloat16
        self.keep(indptr, indices, last, page, dtypes["kv_data_type"])
        self.heads = (num_q, num_kv, dim)

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
        assert (q.shape[1], cache[0].shape[2], q.shape[2]) == self.heads
        self.attend(q, cache, out)


class Prefill(Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
        num_q: int,
        num_kv: int,
        dim: int,
        page: int,
        head_dim_vo: int,
        causal: bool,
        **dtypes: Any,
    ) -> None:
        self.q_len = int(qo_indptr[1])
        assert qo_indptr.diff().unique().tolist() == [self.q_len] and causal == (self.q_len > 1)
        self.keep(indptr, indices, last, page, dtypes["kv_data_type"])

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
        self.attend(q.unflatten(0, (-1, self.q_len)), cache, out)


def xqa_stand_in(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    out: Tensor,
) -> None:
    assert seq_lens.dtype == torch.uint32 and bmm2_scale == 1.0
    assert max_seq_len == block_tables.shape[1] * kv_cache[0].shape[1] >= int(seq_lens.view(torch.int32).max())
    out.copy_(oracle(query, *kv_cache, seq_lens.view(torch.int32), bmm1_scale, block_table=block_tables))


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    for key, value in members.items():
        setattr(made, key, value)
    return made


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = module("flashinfer.decode", xqa_batch_decode_with_kv_cache=xqa_stand_in)
    wrappers = {"BatchDecodeWithPagedKVCacheWrapper": Decode, "BatchPrefillWithPagedKVCacheWrapper": Prefill}
    made = [module("flashinfer", decode=decode, **wrappers), decode]
    made += [
        module(name, flash_attn_with_kvcache=fa3_stand_in) for name in ("flash_attn_interface", "fa3_fwd_interface")
    ]
    for one in made:
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.setattr("splitkv.bench.peers_flashinfer.WORKSPACE_BYTES", 64)


def tensors_of(case: AttentionCase) -> CaseTensors:
    rotation = Rotation(2, 2 * case.set_keys * case.key_bytes, True)
    return CaseTensors(case, rotation, KVArena(*arena_elements(case, rotation), case.kv_dtype, "cpu", seed=7))


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_peer_is_asked_the_question_of_the_case(case: AttentionCase, name: str) -> None:
    contender = CONTENDERS[name]
    reason = contender.unable(case)
    if reason is not None:
        assert "installed" not in reason
        return
    tensors = tensors_of(case)
    call = contender.make(tensors)
    out = call(0).clone()
    assert out.shape == tensors.out_shape
    limit = 6e-2 if contender.quantises and case.kv_dtype == "fp8_e4m3" else 4e-3
    assert parity.error_of(out, tensors.exact()).relative < limit
    assert not torch.equal(call(1), out)  # the second set holds other keys


def test_every_peer_runs_the_uniform_case_and_most_run_the_rest() -> None:
    able = {label: [name for name in PEERS if CONTENDERS[name].unable(case) is None] for label, case in CASES.items()}
    assert able["uniform"] == able["fp8"] == list(PEERS)
    assert able["ragged"] == [name for name in PEERS if name != "fa3"]
    assert able["queries"] == ["flashinfer-tensor", "fa3", "fa3-paged"]
    assert able["192/128"] == ["flashinfer-tensor", "fa3"]
    assert able["page 64"] == ["flashinfer-cuda", "flashinfer-tensor", "fa3-paged"]


def test_pages_of_a_length_that_does_not_fill_them_are_planned_with_the_rest() -> None:
    pages = tensors_of(CASES["uniform"]).pages
    assert pages.indptr.tolist() == [0, ceil(150 / 16), 2 * ceil(150 / 16)] and pages.last_page_len.tolist() == [6, 6]
