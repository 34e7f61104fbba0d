"""Result files: one JSON object that says what was measured, where, from which source, and how to do it
again.

Nothing here is guessed. The tree, git's hash of the package's files, is computed from the files that run. The commit
comes from git, or from the caller where git has no say (a GPU machine that holds only a copy of the tree), or it is
"unknown"; so does the dirty flag. A commit that the caller gives together with its tree is checked against the files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..whole_file import whole_file
from . import machine

UNKNOWN = "unknown"
SIGNIFICANT_DIGITS = 6
RESULTS_FOLDER = "results"
"""Not part of the source: a result file written by one command must not make the next one dirty."""
VARIABLES = ("SPLITKV_POLICY", "SPLITKV_GQA_PACK", "SPLITKV_BACKEND", "SPLITKV_CHECK")
_PACKAGE = Path(__file__).resolve().parent.parent


def provenance(commit: str | None = None, dirty: bool | None = None, folder: Path = _PACKAGE) -> dict[str, Any]:
    """{"commit", "dirty", "commit_source", "tree"} of the source in `folder`.

    commit: a commit, or COMMIT:TREE with what `git rev-parse COMMIT:src/splitkv` says: then the files must be that
    tree's, which is marked "tree", and anyone who has the commit can check it. Else, where git tracks that folder, git
    decides and a contradicting `commit` or `dirty` is a ValueError. Where it does not (an installed wheel, a copied
    tree), the caller's word is taken and marked "option". What nobody says is "unknown".
    """
    if commit is not None and not re.fullmatch(r"[0-9a-f]{7,40}(:[0-9a-f]{40})?", commit):
        raise ValueError(f"commit: expected 7 to 40 hexadecimal digits, or COMMIT:TREE, got {commit!r}")
    tree = source_tree(folder)
    if commit is not None and ":" in commit:
        commit, told = commit.split(":")
        if told != tree:
            raise ValueError(f"commit: expected the tree {tree} of the files here, got {told}")
        if dirty:
            raise ValueError("dirty: expected --clean or nothing, as the files are the tree's, got --dirty")
        return {"commit": commit, "dirty": False, "commit_source": "tree", "tree": tree}
    head = _git_head(folder)
    if head is None:
        return {
            "commit": commit or UNKNOWN,
            "dirty": UNKNOWN if dirty is None else dirty,
            "commit_source": "option" if commit else UNKNOWN,
            "tree": tree,
        }
    paths = [":/", f":(top,exclude){RESULTS_FOLDER}"]
    status = machine.output_of(["git", "status", "--porcelain", "--", *paths], folder)
    changed = UNKNOWN if status is None else bool(status)
    if commit is not None and not head.startswith(commit):
        raise ValueError(f"commit: expected {head} (git's answer here) or nothing, got {commit}")
    if dirty is not None and dirty != changed:
        names = {True: "--dirty", False: "--clean", UNKNOWN: UNKNOWN}
        raise ValueError(f"dirty: expected {names[changed]} (git's answer here) or nothing, got {names[dirty]}")
    return {"commit": head, "dirty": changed, "commit_source": "git", "tree": tree}


def source_tree(folder: Path) -> str:
    """The hash that git gives a folder of these files, bytecode left out: equal trees, equal files."""
    entries = []
    for path in folder.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            entries.append((f"{path.name}/", b"40000", source_tree(path)))
        elif path.is_file() and path.suffix != ".pyc":
            mode = b"100755" if os.access(path, os.X_OK) else b"100644"
            entries.append((path.name, mode, _git_hash(b"blob", path.read_bytes())))
    lines = [
        mode + b" " + name.rstrip("/").encode() + b"\0" + bytes.fromhex(digest)
        for name, mode, digest in sorted(entries)
    ]
    return _git_hash(b"tree", b"".join(lines))


def _git_hash(kind: bytes, data: bytes) -> str:
    return hashlib.sha1(kind + b" %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _git_head(folder: Path) -> str | None:
    """HEAD of the repository that tracks this folder's __init__.py; None if none does or it has no commit.

    A virtual environment inside somebody's repository is not that repository's source.
    """
    if machine.output_of(["git", "ls-files", "--error-unmatch", "__init__.py"], folder) is None:
        return None
    return machine.output_of(["git", "rev-parse", "--verify", "HEAD"], folder)


def command_line(name: str, options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> str:
    """The shell command that re-creates a result: variables of ours that are set, then every resolved option.

    Options are in the order given; True is a bare flag, None and False are left out, sequences are joined by
    commas.
    """
    source = os.environ if environ is None else environ
    words = [f"{variable}={shlex.quote(source[variable])}" for variable in VARIABLES if variable in source]
    words += ["splitkv", name]
    for option, value in options.items():
        if value is None or value is False:
            continue
        words.append(f"--{option.replace('_', '-')}")
        if value is not True:
            words.append(shlex.quote(_option_text(value)))
    return " ".join(words)


def _option_text(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(str(item) for item in value)
    return str(value)


def new_record(schema: str, command: str, source: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The head of a result file: schema, provenance, command, date (UTC) and the machine. Rows come later."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"schema": schema, **source, "command": command, "date": now, **machine.describe(device)}


def to_json(record: Mapping[str, Any]) -> str:
    """Indented JSON: floats to six significant digits, NaN and infinities (which JSON has not) as null."""
    return json.dumps(_tidy(record), indent=2, allow_nan=False) + "\n"


def _tidy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tidy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tidy(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    return value


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a result file, whole or not at all."""
    write_whole(path, to_json(record).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: a temporary file beside it, flushed, then moved over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def require_writable(path: Path) -> None:
    """ValueError, before any measuring, if a result could not be written to `path` afterwards."""
    folder = next(p for p in (path.parent, *path.parent.resolve().parents) if p.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"out: expected a file in a writable folder, got {path}")
