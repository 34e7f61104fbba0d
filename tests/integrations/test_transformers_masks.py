"""What decode_mask answers, and what attention does with it, with masks of the caller's and with what it refuses."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_causal_mask_function
from transformers_zoo import build, prompt

import splitkv
from splitkv.integrations.transformers import attention, decode_mask, register

CAUSAL = SimpleNamespace(is_causal=True, num_key_value_groups=2)


def padding(*rows: str) -> Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


def bounds(**arguments: Any) -> list[list[int]]:
    answer = decode_mask(**arguments)
    assert answer is not None and answer.dtype == torch.int32 and answer.shape[1:3] == (1, 17)
    assert (answer == answer[:, :, :1]).all()
    return answer[:, 0, 0].tolist()


def qkv(q_len: int, keys: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, q_len, 32), (2, keys, 32), (2, keys, 16))
    return tuple(torch.randn(batch, *size, generator=generator).to(dtype) for size in sizes)  # type: ignore[return-value]


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """float64 attention with nothing but a mask: reference_attention over one query at a time, which sees all keys."""
    out = []
    for i in range(q.shape[2]):
        row = None if mask is None else (mask if mask.shape[2] == 1 else mask[:, :, i : i + 1])
        cache = (k.transpose(1, 2), v.transpose(1, 2), k.shape[2])
        out.append(splitkv.reference_attention(q[:, :, i], *cache, mask=row, **options))
    return torch.stack(out, 1)


def test_one_query_that_sees_all_its_keys_needs_no_mask() -> None:
    assert decode_mask(2, 1, 11, q_offset=10) is None
    assert decode_mask(2, 1, 11, q_offset=10, attention_mask=torch.ones(2, 11, dtype=torch.bool)) is None
    assert bounds(batch_size=2, q_length=1, kv_length=11, q_offset=10, allow_is_causal_skip=False) == [[11], [11]]


def test_bounds_of_a_static_cache_follow_its_counter() -> None:
    counter = torch.tensor(10)
    answer = decode_mask(3, 1, 4096, q_offset=counter, allow_is_causal_skip=False)
    counter.add_(1)  # as the layers' update does in the same forward
    assert answer is not None and answer[:, 0, 0].tolist() == [[11], [11], [11]]


def test_left_padding_gives_first_and_count() -> None:
    rows = padding("00111", "11111", "00001")
    arguments: dict[str, Any] = dict(batch_size=3, q_length=1, q_offset=4, attention_mask=rows)
    assert bounds(kv_length=5, **arguments) == [[2, 5], [0, 5], [4, 5]]
    assert bounds(kv_length=9, **arguments) == [[2, 5], [0, 5], [4, 5]], "a static cache has rows to spare"


def test_a_window_moves_the_first_key_and_counts_from_the_layers_first() -> None:
    arguments: dict[str, Any] = dict(
        batch_size=2,
        q_length=1,
        mask_function=sliding_window_causal_mask_function(7),
        local_size=7,
        attention_mask=padding("0" * 16 + "1" * 5, "1" * 21),
    )
    assert bounds(q_offset=20, kv_length=21, **arguments) == [[16, 21], [14, 21]], "all keys kept"
    assert bounds(q_offset=20, kv_offset=14, kv_length=7, **arguments) == [[2, 7], [0, 7]], "the window's keys kept"


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("gaps", dict(attention_mask=padding("11011", "11111"))),
        ("right padding", dict(attention_mask=padding("11110", "11111"))),
        ("a mask with fewer columns than keys", dict(attention_mask=padding("1111", "1111"))),
        ("another function", dict(mask_function=and_masks(causal_mask_function, lambda b, h, q, k: k != 1))),
        ("a union", dict(mask_function=or_masks(causal_mask_function, lambda b, h, q, k: k == 4))),
        ("a window of another size", dict(mask_function=sliding_window_causal_mask_function(3), local_size=4)),
        (
            "queries under a window",
            dict(q_length=2, mask_function=sliding_window_causal_mask_function(3), local_size=3),
        ),
        ("too many queries", dict(q_length=17, kv_length=30, q_offset=13)),
    ],
)
def test_anything_else_is_sdpas_mask(why: str, changes: dict[str, Any]) -> None:
    from transformers.masking_utils import sdpa_mask

    arguments = dict(batch_size=2, q_length=1, kv_length=5, q_offset=4, allow_is_causal_skip=False) | changes
    answer, want = decode_mask(**arguments), sdpa_mask(**arguments)
    assert answer is not None and answer.dtype == torch.bool and torch.equal(answer, want)


@pytest.mark.parametrize("kind", ("bool", "additive"))
@pytest.mark.parametrize("shape", ((2, 1, 1, 50), (1, 4, 1, 50), (2, 4, 1, 50)), ids=str)
def test_masks_of_the_callers_are_honoured(kind: str, shape: tuple[int, ...], calls: list[dict[str, Any]]) -> None:
    q, k, v = qkv(1, 50)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[..., :8] = mask[..., 40:] = False
    mask[..., 20] = True
    given = mask if kind == "bool" else torch.where(mask, 0.5 * torch.ones(50), torch.finfo(torch.float32).min)
    out, weights = attention(CAUSAL, q, k, v, given)
    assert weights is None and out.shape == (2, 1, 4, 16) and len(calls) == 1
    want = exact(q, k, v, mask)  # a constant on every visible key changes nothing
    assert (out - want).abs().max() <= 1e-5
    if kind == "bool":
        assert int(calls[0]["starts"].min()) >= 8 and int(calls[0]["seq_lens"].max()) <= 40


def test_keys_beyond_a_bool_masks_last_are_not_read() -> None:
    q, k, v = qkv(1, 50)
    mask = (torch.arange(50) < 30).view(1, 1, 1, 50)
    want = exact(q, k, v, mask)
    k[:, :, 30:], v[:, :, 30:] = torch.nan, torch.nan
    assert (attention(CAUSAL, q, k, v, mask)[0] - want).abs().max() <= 1e-5


@pytest.mark.parametrize("options", ({}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}), ids=str)
@pytest.mark.parametrize("kind", ("none", "bool", "additive", "one row"))
def test_prefill_against_float64(options: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from splitkv.integrations import transformers as integration

    monkeypatch.setattr(integration, "PREFILL_BLOCK_BYTES", 7 * 2 * 4 * 40 * 4)  # blocks of 7 queries
    q, k, v = qkv(33, 40)
    mask = torch.rand(2, 1, 33, 40, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[..., 0] = True
    if kind == "none":
        mask = torch.arange(33)[:, None].view(1, 1, 33, 1) >= torch.arange(40)
    elif kind == "one row":
        mask = mask[:, :, :1]
    given = None if kind == "none" else mask
    if kind == "additive":
        given = torch.where(mask, 0.0, -torch.inf)
    out, _ = attention(CAUSAL, q, k, v, given, scaling=0.3, **options)
    want = exact(q, k, v, mask, softmax_scale=0.3, softcap=options.get("softcap"), sinks=options.get("s_aux"))
    assert (out - want).abs().max() <= 1e-5


def test_queries_that_see_each_other_go_to_sdpa(calls: list[dict[str, Any]]) -> None:
    """A short encoder, or a block of image tokens: up to 16 queries, and still not causal."""
    q, k, v = qkv(5, 5)
    out, _ = attention(SimpleNamespace(is_causal=False, num_key_value_groups=2), q, k, v, None)
    assert not calls and (out - exact(q, k, v, None)).abs().max() <= 1e-5


@pytest.mark.parametrize("mask", (None, torch.arange(40).view(2, 1, 1, 20) % 3 > 0), ids=("all", "bool"))
def test_position_bias_is_added(mask: Tensor | None) -> None:
    q, k, v = qkv(1, 20)
    bias = torch.randn(1, 4, 1, 20, generator=torch.Generator().manual_seed(4))
    want = exact(q, k, v, bias if mask is None else bias.masked_fill(~mask, -torch.inf))
    assert (attention(CAUSAL, q, k, v, mask, position_bias=bias)[0] - want).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(dropout=0.1), splitkv.UnsupportedError, r"dropout: expected 0.*got 0\.1; call model\.eval\(\)"),
        (dict(output_attentions=True), splitkv.UnsupportedError, "output_attentions: expected False.*'eager'"),
        (dict(indices=torch.zeros(1)), splitkv.UnsupportedError, "indices: expected None.*sparse attention"),
        (dict(block_indices=torch.zeros(1)), splitkv.UnsupportedError, "block_indices: expected None"),
        (dict(attention_mask=torch.ones(2, 1, 1, 20, dtype=torch.int64)), TypeError, "mask: expected dtype.*int64"),
        (dict(attention_mask=torch.ones(2, 1, 1, 20, dtype=torch.int32)), ValueError, "attention_mask: expected bool"),
        (dict(attention_mask=torch.ones(2, 1, 17, 20, dtype=torch.int32)), ValueError, "attention_mask: expected bool"),
        (dict(attention_mask=torch.ones(2, 1, 17, 20)), ValueError, r"attention_mask: expected bool.*\(2, 1, 17, 20\)"),
        (dict(attention_mask=torch.ones(2, 20)), ValueError, r"attention_mask: expected bool.*\(2, 20\)"),
        (dict(attention_mask=torch.ones(2, 1, 1, 19, dtype=torch.bool)), ValueError, "mask: expected a shape"),
    ],
)
def test_what_cannot_be_right_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = qkv(1, 20)
    with pytest.raises(error, match=message):
        attention(CAUSAL, q, k, v, **{"attention_mask": None} | changes)


def test_softcap_with_a_position_bias_is_refused_at_prefill() -> None:
    q, k, v = qkv(20, 20)
    with pytest.raises(splitkv.UnsupportedError, match="position_bias: supported without softcap"):
        attention(CAUSAL, q, k, v, None, softcap=1.0, position_bias=torch.zeros(1, 4, 20, 20))


def test_gradients_are_refused_and_inference_is_not() -> None:
    model, ids = build("llama"), prompt(20)
    model.set_attn_implementation("splitkv")
    with pytest.raises(splitkv.UnsupportedError, match=r"query: expected no gradient.*inference_mode"):
        model(ids)
    with torch.inference_mode():
        assert torch.isfinite(model(ids).logits).all()


def test_a_models_call_for_attention_weights_is_refused() -> None:
    model, ids = build("llama"), prompt(20)
    model.set_attn_implementation("splitkv")
    with pytest.raises(ValueError, match="output_attentions"), torch.no_grad():
        model(ids, output_attentions=True)


@pytest.mark.parametrize("name", ("sdpa", "eager", "flash_attention_2", "org/kernel", ""))
def test_names_that_transformers_uses_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name: expected an identifier"):
        register(name)


def test_registering_again_or_under_another_name_is_fine() -> None:
    register()
    register("splitkv_too")
    model, ids = build("llama"), prompt(20)
    model.set_attn_implementation("splitkv_too")
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()
    with pytest.raises(TypeError, match="name: expected a str, got int"):
        register(3)  # type: ignore[arg-type]


def test_without_transformers_the_import_says_what_to_install() -> None:
    program = "import sys; sys.modules['transformers'] = None; import splitkv.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and "expected transformers 5.16 or later (pip install" in done.stderr
