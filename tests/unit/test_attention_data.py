"""The views that contenders get: the same keys for everybody, and a float64 that agrees with the oracle."""

from itertools import pairwise

import pytest
import torch

import splitkv
from splitkv.bench.attention_cases import AttentionCase
from splitkv.bench.attention_data import HEAD_MAJOR, CaseTensors, KVArena, arena_elements, causal_mask
from splitkv.bench.timing import Rotation

UNIFORM = AttentionCase("x", 2, 4, 2, 32, 150, "f32")
UNEVEN = AttentionCase("x", 1, 4, 2, 48, 150, "f32", v_head_dim=32, q_len=4)
RAGGED = AttentionCase("x", 3, 4, 2, 32, 90, "f32", page_size=16, lens=(90, 5, 33))
ROOMY = AttentionCase("x", 1, 4, 2, 32, 100, "f32", capacity=1024)
FP8 = AttentionCase("x", 1, 4, 2, 32, 100, "fp8_e4m3", page_size=16)
CASES = {"uniform": UNIFORM, "uneven": UNEVEN, "ragged": RAGGED, "roomy": ROOMY, "fp8": FP8}
SETS = 3


def tensors_of(case: AttentionCase) -> CaseTensors:
    rotation = Rotation(SETS, SETS * case.set_keys * case.key_bytes, True)
    return CaseTensors(case, rotation, KVArena(*arena_elements(case, rotation), case.kv_dtype, "cpu", seed=3))


def paged_row(tensors: CaseTensors, b: int, i: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Row b of set i through the block table."""
    pages = tensors.pages.block_table[b].long()
    length = tensors.case.row_lens[b]
    k, v = (part[pages].flatten(0, 1)[:length] for part in tensors.pool(i))
    return k, v


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_float64_agrees_with_the_oracle(case: AttentionCase) -> None:
    tensors = tensors_of(case)
    for b, length in enumerate(case.row_lens):
        k, v = (part[None].to(tensors.q.dtype) for part in paged_row(tensors, b))
        if not case.lens:
            k, v = (part[b : b + 1].to(tensors.q.dtype) for part in tensors.rows(0))
        oracle = splitkv.reference_attention(tensors.q[b : b + 1], k, v, length)
        assert isinstance(oracle, torch.Tensor)
        torch.testing.assert_close(tensors.exact()[b : b + 1], oracle, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", [UNIFORM, UNEVEN, FP8], ids=["uniform", "uneven", "fp8"])
def test_pages_hold_the_keys_of_the_contiguous_rows_in_another_order(case: AttentionCase) -> None:
    tensors = tensors_of(case)
    for b in range(case.batch):
        (k, _), whole = paged_row(tensors, b, i=1), tensors.valid_rows(1)[0][b]
        mixed, straight = k.float().flatten(1), whole.float().flatten(1)
        assert not torch.equal(mixed, straight)
        assert sorted(mixed.tolist()) == sorted(straight.tolist())
        assert torch.equal(mixed[-16:], straight[-16:])  # where the queries' own keys lie


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_page_lists_say_what_the_block_table_says(case: AttentionCase) -> None:
    pages = tensors_of(case).pages
    for b, length in enumerate(case.row_lens):
        mine = pages.indices[pages.indptr[b] : pages.indptr[b + 1]]
        assert torch.equal(mine, pages.block_table[b, : len(mine)])
        assert (len(mine) - 1) * case.pool_page + int(pages.last_page_len[b]) == length
    assert len(set(pages.indices.tolist())) == len(pages.indices)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_two_sets_share_a_valid_key(case: AttentionCase) -> None:
    tensors = tensors_of(case)
    spans = [tensors.pool(i)[0] for i in range(SETS)]
    starts = [part.data_ptr() for part in spans]
    size = spans[0].numel() * spans[0].element_size()
    assert all(b - a >= size for a, b in pairwise(starts))


def test_spare_capacity_reaches_over_later_sets_and_stays_inside_the_arena() -> None:
    k, v = tensors_of(ROOMY).rows(SETS - 1)
    assert k.shape == v.shape == (1, 1024, 2, 32)


def test_head_major_is_the_same_memory_and_has_its_own_float64() -> None:
    tensors = tensors_of(UNIFORM)
    k, v = tensors.head_major(0)
    assert k.is_contiguous() and k.data_ptr() == tensors.rows(0)[0].data_ptr()
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(tensors.q4.transpose(1, 2).double(), k.double(), v.double(), enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(tensors.exact(HEAD_MAJOR), out.reshape(tensors.out_shape), rtol=1e-10, atol=1e-10)


def test_plain_pytorch_is_near_float64() -> None:
    for case in (UNIFORM, UNEVEN, RAGGED):
        tensors = tensors_of(case)
        torch.testing.assert_close(tensors.plain().double(), tensors.exact(), rtol=1e-4, atol=1e-5)


def test_the_mask_lets_each_query_see_up_to_itself() -> None:
    mask = causal_mask(3, 5, "cpu")
    assert mask is not None and mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(1, 5, "cpu") is None
