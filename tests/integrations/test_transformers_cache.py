"""SplitKVCache under generate and forward: contiguous and paged rows, every storage type, beams, rollback, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers_zoo import COMMON, ZOO, audit_flip, build, exactly, generate, prompt

import splitkv
from splitkv.integrations.transformers import SplitKVCache, attention
from splitkv.integrations.transformers_cache import SplitKVLayer, StoredKV, stored_behind

PAGES = (None, 5)
SCALES = torch.tensor([0.5, 2.0])
NAMES = [name for name in ZOO if name != "deepseek-v2"]  # whose cache holds latents


def padding_of(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, :2] = 0, 0
    return mask


def stored(cache: SplitKVCache, rows: Tensor) -> StoredKV:
    found = stored_behind(*cache.update(rows, rows, 0))
    assert found is not None
    return found


def attention_layers(cache: SplitKVCache) -> list[SplitKVLayer]:
    return [layer for layer in cache.layers if isinstance(layer, SplitKVLayer)]


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", (6, 20))
def test_greedy_tokens_are_those_of_eager(name: str, page_size: int | None, length: int) -> None:
    model, ids = build(name), prompt(length, batch=3)
    mask = padding_of(ids) if length == 20 else None
    want, want_logits = generate(model, "eager", ids, attention_mask=mask)
    cache = SplitKVCache(model.config, max_length=50, page_size=page_size)
    got, got_logits = generate(model, "splitkv", ids, attention_mask=mask, past_key_values=cache)
    assert audit_flip(model, ids, got, want, mask) <= 1e-4
    if torch.equal(got, want):
        assert (got_logits - want_logits).abs().max() <= 5e-5
    for layer in attention_layers(cache):
        assert layer.store is not None and layer.length == length + 23
        assert layer.store.seq_lens.tolist() == [length + 23] * 3 and not layer.store.dropped.any()


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2), ids=str)
def test_other_storage_types_equal_rows_rounded_by_hand(dtype: torch.dtype, page_size: int | None) -> None:
    """The same steps over a float32 cache whose rows were rounded in between give the same logits."""
    model, ids = build("llama"), prompt(30, batch=2)
    scale = SCALES[:1] if dtype.itemsize == 1 else 1.0  # one KV head
    model.set_attn_implementation("splitkv")

    def steps(cache: Any, after: Any = lambda: None) -> Tensor:
        with torch.no_grad():
            chunks = [model(ids[:, :24], past_key_values=cache).logits]
            for i in range(24, 30):
                after()
                chunks.append(model(ids[:, [i]], past_key_values=cache).logits)
        return torch.cat(chunks, 1)

    got = steps(SplitKVCache(model.config, 32, dtype=dtype, page_size=page_size, k_scale=scale, v_scale=scale))
    plain = transformers.DynamicCache(config=model.config)

    def round_rows() -> None:
        for layer in plain.layers:
            layer.keys, layer.values = ((x / scale).to(dtype).float() * scale for x in (layer.keys, layer.values))

    want = steps(plain, round_rows)  # the step's own row is rounded one step late
    unrounded = exactly(model, ids)
    assert (got[:, :24] - unrounded[:, :24]).abs().max() <= 5e-5, "prefill attends to rows as computed"
    error = (got - want)[:, 24:].square().mean().sqrt()
    assert error <= 0.5 * (want - unrounded)[:, 24:].square().mean().sqrt()
    assert error > 0


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("name", ("qwen3", "gemma2", "gemma3"))
@pytest.mark.parametrize("scaled", (False, True), ids=("unscaled", "scaled"))
def test_chunks_of_every_length(name: str, page_size: int | None, scaled: bool) -> None:
    """Prefill after a cache reads stored rows back; up to 16 queries go to the kernel. Scales are powers of two."""
    model, ids = build(name), prompt(75, batch=2)
    model.set_attn_implementation("splitkv")
    scales = dict(k_scale=SCALES, v_scale=0.25) if scaled else {}
    cache = SplitKVCache(model.config, 80, page_size=page_size, **scales)
    with torch.no_grad():
        got = torch.cat([model(chunk, past_key_values=cache).logits for chunk in ids.split((20, 18, 9, 25, 3), 1)], 1)
    assert (got - exactly(model, ids)).abs().max() <= 5e-5


@pytest.mark.parametrize("page_size", PAGES)
def test_rows_are_appended_in_place(page_size: int | None, calls: list[dict[str, Any]]) -> None:
    model, ids = build("qwen3"), prompt(20, batch=2)
    cache = SplitKVCache(model.config, 60, page_size=page_size)
    generate(model, "splitkv", ids, past_key_values=cache)
    stores = [layer.store for layer in attention_layers(cache)]
    assert {call["k_cache"].data_ptr() for call in calls} == {store.k_cache.data_ptr() for store in stores if store}
    assert cache.bytes == 2 * 2 * 2 * 60 * 2 * 32 * 4, "2 layers of K and V: 2 rows of 60 tokens, 2 heads of 32"


@pytest.mark.parametrize("page_size", PAGES)
def test_gaps_in_the_padding_mask_are_honoured(page_size: int | None, calls: list[dict[str, Any]]) -> None:
    model, ids = build("llama"), prompt(20, batch=2)
    mask = torch.ones_like(ids)
    mask[0, 3:6] = 0
    want, _ = generate(model, "eager", ids, attention_mask=mask)
    cache = SplitKVCache(model.config, 60, page_size=page_size)
    got, _ = generate(model, "splitkv", ids, attention_mask=mask, past_key_values=cache)
    assert torch.equal(got, want) and calls[0]["mask"] is not None


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float8_e5m2), ids=str)
def test_beams_and_rollback(page_size: int | None, dtype: torch.dtype) -> None:
    """Beam search reorders rows; prompt lookup decodes several tokens and takes some back."""
    model, ids = build("llama"), prompt(20, batch=1)
    ids = torch.cat((ids, ids), 1)
    for options in (dict(num_beams=3), dict(prompt_lookup_num_tokens=4)):
        reference = SplitKVCache(model.config, 80, dtype=dtype)
        if "num_beams" in options and dtype == torch.float32:
            want, _ = generate(model, "eager", ids, **options)
        elif "num_beams" in options:
            want, _ = generate(model, "splitkv", ids, past_key_values=reference, **options)
        else:
            want, _ = generate(model, "splitkv", ids, past_key_values=reference)
        cache = SplitKVCache(model.config, 80, dtype=dtype, page_size=page_size)
        got, _ = generate(model, "splitkv", ids, past_key_values=cache, **options)
        assert torch.equal(got, want), options


def test_reorder_moves_rows_of_pages_and_of_bytes() -> None:
    order = torch.tensor([2, 0, 2])
    for page_size in PAGES:
        for dtype in (torch.float16, torch.float8_e4m3fn):
            cache = SplitKVCache(build("llama").config, 12, page_size=page_size, dtype=dtype)
            rows = torch.randn(3, 1, 7, 16, generator=torch.Generator().manual_seed(0))
            cache.update(rows, 2 * rows, 0)
            before = stored(cache, rows[:, :, :1]).dense(8, torch.float32)
            cache.reorder_cache(order)
            after = stored(cache, rows[:, :, :1]).dense(8, torch.float32)
            assert all(torch.equal(a, b[order]) for a, b in zip(after, before, strict=True))


def test_reset_crop_and_reuse() -> None:
    model, ids = build("qwen3"), prompt(20, batch=2)
    cache = SplitKVCache(model.config, 50)
    want, _ = generate(model, "splitkv", ids, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    again, _ = generate(model, "splitkv", ids, past_key_values=cache)
    assert torch.equal(again, want)
    cache.crop(-3)
    assert cache.get_seq_length() == 40
    cache.crop(11)
    assert {int(n) for layer in attention_layers(cache) for n in layer.store.seq_lens} == {11}  # type: ignore[union-attr]


def test_a_full_cache_and_another_batch_are_refused() -> None:
    model, ids = build("llama"), prompt(20, batch=2)
    with pytest.raises(ValueError, match=r"past_key_values: expected up to 24 tokens.*got 1 more than 24"):
        generate(model, "splitkv", ids, past_key_values=SplitKVCache(model.config, 24))
    cache = SplitKVCache(model.config, 24)
    cache.update(torch.zeros(2, 1, 3, 16), torch.zeros(2, 1, 3, 16), 0)
    with pytest.raises(ValueError, match="key_states: expected batch 2, got 1"):
        cache.update(torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 3, 16), 0)


def test_rows_that_only_splitkv_can_read_fail_loudly_elsewhere() -> None:
    model, ids = build("llama"), prompt(20, batch=2)
    for options in (dict(page_size=4), dict(dtype=torch.float8_e4m3fn)):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta|same dtype"):
            generate(model, "sdpa", ids, past_key_values=SplitKVCache(model.config, 60, **options))
    want, _ = generate(model, "eager", ids)
    got, _ = generate(model, "sdpa", ids, past_key_values=SplitKVCache(model.config, 60))
    assert torch.equal(got, want), "plain rows are plain tensors"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(config=3), TypeError, "config: expected a model's config, got int"),
        (dict(max_length="9"), TypeError, "max_length: expected an int, got str"),
        (dict(max_length=True), TypeError, "max_length: expected an int, got bool"),
        (dict(max_length=0), ValueError, "max_length: expected at least 1, got 0"),
        (dict(page_size=0), ValueError, "page_size: expected at least 1, got 0"),
        (dict(page_size=1.5), TypeError, "page_size: expected an int, got float"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SplitKVCache(**dict(config=build("llama").config, max_length=9) | changes)


def test_layers_that_are_not_known_are_refused() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=1)
    config.layer_types = ["hybrid"]
    with pytest.raises(splitkv.UnsupportedError, match="supported layer types are full_attention.*got hybrid"):
        SplitKVCache(config, 9)
    cache = SplitKVCache(build("llama").config, 9)
    with pytest.raises(splitkv.UnsupportedError, match="offloading"):
        cache.layers[0].offload()


def test_a_mask_over_keys_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length is the capture's, and every replay would hide what came since."""
    from splitkv.integrations import transformers as integration

    model, ids = build("llama"), prompt(20, batch=2)
    model.set_attn_implementation("splitkv")
    cache = SplitKVCache(model.config, 40)
    with torch.no_grad():
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        for name in ("is_tracing", "is_cuda_stream_capturing"):
            monkeypatch.setattr(integration, name, lambda *_: True)
        model(token, past_key_values=cache)
        with pytest.raises(splitkv.UnsupportedError, match="attention_mask: supported in the capture"):
            model(token, attention_mask=padding_of(torch.ones(2, 22)).bool(), past_key_values=cache)


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("window", (0, 7))
def test_a_replayed_step_goes_by_the_devices_lengths(window: int, page_size: int | None) -> None:
    """A graph's replay appends to the store and reads it with the arguments of its capture."""
    generator = torch.Generator().manual_seed(0)
    query, rows = torch.randn(2, 4, 1, 16, generator=generator), torch.randn(2, 2, 30, 16, generator=generator)
    layer = SplitKVLayer(40, window=window, page_size=page_size)
    module = torch.nn.Identity()
    key, value = layer.update(rows[:, :, :12], rows[:, :, :12].neg())  # the capture
    for length in range(13, 31):
        layer.store.append(rows[:, :, length - 1].clone(), -rows[:, :, length - 1].clone())  # type: ignore[union-attr]
        got, _ = attention(module, query, key, value, None)
        cache = rows.transpose(1, 2)
        want = splitkv.reference_attention(query[:, :, 0], cache, -cache, length, window=window)
        assert (got[:, 0] - want).abs().max() <= 1e-5


@pytest.mark.parametrize("page_size", PAGES)
def test_a_model_that_changes_what_the_cache_returned(page_size: int | None) -> None:
    """DiffLlama joins the halves of its values after the cache: they are then not what is stored."""
    torch.manual_seed(0)
    config = transformers.DiffLlamaConfig(**COMMON)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids, cache = prompt(20, batch=2), SplitKVCache(config, 50, page_size=page_size)
    if page_size is None:
        want, _ = generate(model, "eager", ids)
        got, _ = generate(model, "splitkv", ids, past_key_values=cache)
        assert torch.equal(got, want)
    else:
        with pytest.raises(
            splitkv.UnsupportedError, match="past_key_values: DiffLlamaAttention changes keys or values"
        ):
            generate(model, "splitkv", ids, past_key_values=cache)
