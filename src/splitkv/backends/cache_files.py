"""Where compiled kernels are kept."""

from __future__ import annotations

import os
import tempfile
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
