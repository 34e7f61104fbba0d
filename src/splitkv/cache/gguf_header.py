"""The header of a GGUF file: its metadata, and where its tensors lie. Every count and offset is checked first.

The gguf package's reader trusts a file's counts: an array that claims 2**60 items keeps it busy for ever, and a
tensor may lie outside the file. Here nothing is read or looped over that the file's size does not cover.
ValueError names the file and the field.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GGUF_HINT = "reading a GGUF file needs the gguf package: pip install 'splitkv[models]'"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_MOST_NESTING = 4
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 13, 32
"""A key of no letters with a value of one byte; a tensor's record with no name and one dimension."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. shape: slowest dimension first, as torch has it. type_id: GGML's. start: byte in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """metadata: key to value, arrays as lists. tensors: by name, in the file's order."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads forward through the bytes of a file and never past their end."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self.data, self.file, self.at = data, file, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def error(self, field: str, text: str) -> ValueError:
        return ValueError(f"{self.file}: expected a complete GGUF file; {field}: {text}")

    def need(self, count: int, field: str) -> None:
        if count > self.left:
            raise self.error(field, f"expected {count} more bytes, and the file ends after {self.left}")

    def number(self, code: str, field: str) -> Any:
        layout = struct.Struct(f"<{code}")
        self.need(layout.size, field)
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def count(self, field: str, least_bytes: int) -> int:
        """A number of things that each take at least so many bytes."""
        value = int(self.number("Q", field))
        if value * least_bytes > self.left:
            raise self.error(field, f"expected a count that {self.left} more bytes can hold, got {value}")
        return value

    def text(self, field: str) -> str:
        size = int(self.number("Q", field))
        self.need(size, field)
        raw = self.data[self.at : self.at + size]
        self.at += size
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(field, f"expected UTF-8 text, got {raw[:20]!r}: {error.reason}") from None

    def value(self, kind: int, field: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text(field)
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], field)
        if kind != _ARRAY or depth == _MOST_NESTING:
            raise self.error(field, f"expected a GGUF value type, 0 to 12, got {kind}")
        item_kind = int(self.number("I", field))
        if item_kind not in _NUMBERS:
            size = self.count(field, 8)
            return [self.value(item_kind, field, depth + 1) for _ in range(size)]
        width = struct.calcsize(_NUMBERS[item_kind])
        size = self.count(field, width)
        items = list(struct.unpack_from(f"<{size}{_NUMBERS[item_kind]}", self.data, self.at))
        self.at += size * width
        return items


def read_gguf_header(file: Path) -> GgufHeader:
    """The header of a GGUF file of version 2 or 3, little-endian. No tensor is read.

    ValueError with file and field where the file is cut short, or a count, type, shape or offset cannot be right.
    """
    sizes = _block_sizes(file)
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data, file), sizes)
    except ValueError as error:
        if str(error).startswith(str(file)):
            raise
        raise ValueError(f"{file}: expected a complete GGUF file, got an empty one") from None
    except OSError as error:
        raise ValueError(f"{file}: expected a complete GGUF file, and it cannot be read: {error}") from None


def _read(cursor: _Cursor, sizes: dict[int, tuple[int, int]]) -> GgufHeader:
    magic = cursor.data[:4]
    if magic != _MAGIC:
        raise cursor.error("magic", f"expected a GGUF file, which begins with {_MAGIC!r}, got {magic!r}")
    cursor.at = 4
    version = cursor.number("I", "version")
    if version not in _VERSIONS:
        raise cursor.error("version", f"expected 2 or 3, little-endian, got {version}")
    num_tensors = cursor.count("tensor_count", _LEAST_TENSOR_BYTES)
    num_keys = cursor.count("kv_count", _LEAST_KEY_BYTES)
    metadata: dict[str, Any] = {}
    for i in range(num_keys):
        key = cursor.text(f"key {i} of {num_keys}")
        if key in metadata:
            raise cursor.error(key, "expected once, and it is there twice")
        metadata[key] = cursor.value(int(cursor.number("I", key)), key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.error("general.alignment", f"expected a power of two from 8 on, got {alignment!r}")
    found = [_tensor_record(cursor, i, num_tensors) for i in range(num_tensors)]
    begin = -(-cursor.at // alignment) * alignment
    return GgufHeader(metadata, _placed(cursor, found, sizes, begin, alignment))


def _tensor_record(cursor: _Cursor, i: int, of: int) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, type, offset within the data) of one tensor, as written."""
    name = cursor.text(f"name of tensor {i} of {of}")
    label = name or f"tensor {i} of {of}"
    dimensions = cursor.number("I", f"{label}: dimensions")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise cursor.error(label, f"expected 1 to {_MOST_DIMENSIONS} dimensions, got {dimensions}")
    shape = tuple(int(cursor.number("Q", f"{label}: shape")) for _ in range(dimensions))[::-1]
    if min(shape) < 1:
        raise cursor.error(label, f"expected a shape of positive sizes, got {shape}")
    return name, shape, int(cursor.number("I", f"{label}: type")), int(cursor.number("Q", f"{label}: offset"))


def _placed(
    cursor: _Cursor,
    found: list[tuple[str, tuple[int, ...], int, int]],
    sizes: dict[int, tuple[int, int]],
    begin: int,
    alignment: int,
) -> dict[str, GgufTensor]:
    """The tensors with their place in the file, which must hold each of them whole and apart from the others."""
    size = len(cursor.data)
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in found:
        if name in tensors:
            raise cursor.error(name, "expected one tensor of this name, got two")
        if type_id not in sizes:
            raise cursor.error(name, f"expected a GGML type that the gguf package knows, got {type_id}")
        block, block_bytes = sizes[type_id]
        if shape[-1] % block:
            raise cursor.error(name, f"expected rows of whole blocks of {block}, got shape {shape}")
        nbytes = math.prod(shape) // block * block_bytes
        start = begin + offset
        if offset % alignment or start + nbytes > size:
            raise cursor.error(
                name,
                f"expected an offset that is a multiple of {alignment} with {nbytes} bytes in the file's {size - begin}"
                f" bytes of data, got {offset}",
            )
        tensors[name] = GgufTensor(name, shape, type_id, start, nbytes)
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start < end:
            raise cursor.error(tensor.name, f"expected an offset behind {last}, and it lies inside it")
        end, last = tensor.start + tensor.nbytes, tensor.name
    return tensors


def _block_sizes(file: Path) -> dict[int, tuple[int, int]]:
    """(elements, bytes) of a block of each GGML type."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise ValueError(f"{file}: {GGUF_HINT}") from None
    return {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
