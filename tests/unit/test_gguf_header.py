"""The GGUF header reader: right on good files, and on bad ones an error with file and field, at once."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitkv.cache.gguf_header import read_gguf_header

gguf = pytest.importorskip("gguf")
HEAD = 24  # magic, version, tensor count, key count


def good(file: Path) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.eps", 0.5)
    writer.add_bool("flag", True)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("words", ["a", "Ġb", ""])
    writer.add_tensor("first.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    packed = gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("second.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return good(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def test_it_says_what_the_gguf_package_says(tmp_path: Path) -> None:
    file = good(tmp_path / "m.gguf")
    header, reader = read_gguf_header(file), gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == fields
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert ours.shape == tuple(int(n) for n in theirs.shape[::-1])
        assert (ours.type_id, ours.start, ours.nbytes) == (theirs.tensor_type, theirs.data_offset, theirs.n_bytes)
        assert ours.elements == theirs.n_elements


def place(whole: bytes, text: bytes) -> int:
    """Where what follows this text begins."""
    assert whole.count(text) == 1
    return whole.index(text) + len(text)


def patched(whole: bytes, at: int, layout: str, value: int) -> bytes:
    packed = struct.pack(f"<{layout}", value)
    return whole[:at] + packed + whole[at + len(packed) :]


# name: (what to find, bytes behind it, layout, value, the message)
LIES = {
    "magic": (b"", 0, "I", 0x46554748, "magic: expected a GGUF file"),
    "version 1": (b"GGUF", 0, "I", 1, "version: expected 2 or 3"),
    "big-endian": (b"GGUF", 0, "I", 3 << 24, "version: expected 2 or 3"),
    "tensor count": (b"GGUF", 4, "Q", 1 << 60, "tensor_count: expected a count that"),
    "one tensor more": (b"GGUF", 4, "Q", 3, "tensor 2 of 3"),
    "key count": (b"GGUF", 12, "Q", 1 << 60, "kv_count: expected a count that"),
    "one key fewer": (b"GGUF", 12, "Q", 5, "expected 1 to 4 dimensions"),
    "value type": (b"llama.block_count", 0, "I", 99, "llama.block_count: expected a GGUF value type"),
    "item type": (b"numbers", 4, "I", 13, "numbers: expected a GGUF value type"),
    "array length": (b"numbers", 8, "Q", 1 << 61, "numbers: expected a count that"),
    "text array length": (b"words", 8, "Q", 1 << 61, "words: expected a count that"),
    "text length": (b"words", 16, "Q", 1 << 40, "words: expected 1099511627776 more bytes"),
    "not UTF-8": (b"words", 24, "B", 0xFF, "words: expected UTF-8 text"),
    "dimensions": (b"first.weight", 0, "I", 9, "first.weight: expected 1 to 4 dimensions, got 9"),
    "no rows": (b"first.weight", 12, "Q", 0, "first.weight: expected a shape of positive sizes"),
    "too many rows": (b"first.weight", 12, "Q", 1 << 40, "first.weight: expected an offset"),
    "half a block": (b"second.weight", 4, "Q", 48, "second.weight: expected rows of whole blocks of 32"),
    "type": (b"second.weight", 20, "I", 77, "second.weight: expected a GGML type"),
    "far offset": (b"second.weight", 24, "Q", 1 << 50, "second.weight: expected an offset"),
    "odd offset": (b"second.weight", 24, "Q", 257, "second.weight: expected an offset"),
    "offset inside another": (b"second.weight", 24, "Q", 32, "second.weight: expected an offset behind first.weight"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_told_with_file_and_field(lie: str, whole: bytes, tmp_path: Path) -> None:
    text, further, layout, value, message = LIES[lie]
    file = tmp_path / "lie.gguf"
    file.write_bytes(patched(whole, (place(whole, text) if text else 0) + further, layout, value))
    with pytest.raises(ValueError) as caught:
        read_gguf_header(file)
    assert str(caught.value).startswith(f"{file}: expected a complete GGUF file") and message in str(caught.value)


def test_a_tensor_of_the_same_name_twice(whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "twice.gguf"
    file.write_bytes(whole.replace(b"second.weight", b"first.weight\0").replace(b"first.weight\0", b"first.weight0"))
    read_gguf_header(file)  # another name of the same length is fine
    shorter = whole.replace(struct.pack("<Q", 13) + b"second.weight", struct.pack("<Q", 12) + b"first.weight")
    file.write_bytes(shorter + b"\0")
    with pytest.raises(ValueError, match="first.weight: expected one tensor of this name, got two"):
        read_gguf_header(file)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95])
def test_a_file_cut_short(share: float, whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "short.gguf"
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=f"{file}: expected a complete GGUF file"):
        read_gguf_header(file)


@settings(max_examples=300)
@given(at=st.integers(0, 700), value=st.integers(0, 255))
def test_any_byte_may_be_wrong(at: int, value: int, whole: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "any.gguf"
    file.write_bytes(patched(whole, min(at, len(whole) - 1), "B", value))
    try:
        header = read_gguf_header(file)
    except ValueError as error:
        assert str(error).startswith(f"{file}: expected a complete GGUF file")
    else:
        assert all(tensor.start + tensor.nbytes <= len(whole) for tensor in header.tensors.values())
