"""Where compiled kernels are kept, and how files get there whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/splitkv or ~/.cache/splitkv, made if need be; where neither can be written, a new temporary
    directory, so that a read-only home costs a compilation per process and nothing else. Raises OSError."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        directory = (Path(base) if base else Path.home() / ".cache") / "splitkv"
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK | os.X_OK):
            return directory
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    return Path(tempfile.mkdtemp(prefix="splitkv-"))


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` to write, which takes its place at the end: no reader ever sees half of it. It is
    removed where the block fails. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".tmp")
    os.close(handle)
    try:
        yield Path(temporary)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
