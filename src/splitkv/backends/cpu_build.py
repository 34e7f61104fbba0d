"""Compile the CPU kernel with the system's C compiler, once per machine, and load it.

The library is cached under a hash of everything that shapes it (sources, flags, compiler, processor) and moved
into place whole, so processes that start together may all build it and none sees half a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..whole_file import whole_file
from .cache_files import cache_directory

SOURCE = Path(__file__).with_name("cpu_kernel.c")
_PARTS = ("ahead", "attend", "call", "product", "rows", "scores", "stream", "tile", "tree", "vec")
HEADERS = tuple(f"cpu_{part}.h" for part in _PARTS)

BASE_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
FLAG_LADDER = (  # best first: the first rung that the compiler takes is used
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
COMPILE_TIMEOUT_S = 120
VENDOR_FLAGS = {"AuthenticAMD": ("-DAMD",)}
"""By the processor's own name for its maker: what cpu_rows.h and cpu_ahead.h do otherwise there."""


class BuildError(RuntimeError):
    """No library could be made; the text says why, for people."""


@dataclass(frozen=True)
class Library:
    """The loaded kernel, where it lies, the compiler's own name for itself, and the flags that it took."""

    functions: ctypes.CDLL
    path: Path
    compiler: str
    flags: tuple[str, ...]


def load_library() -> Library:
    """The kernel for this machine, from the cache or compiled now. Raises BuildError."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    compiler = _compiler_version(command)
    try:
        directory = cache_directory()
    except OSError as error:
        raise BuildError(f"no directory to keep the compiled kernel in: {error}") from error
    first_failure = ""
    for rung in FLAG_LADDER:
        flags = (*rung, *vendor_flags())
        path = directory / f"cpu-{_fingerprint(command, compiler, flags)}.so"
        failure = "" if path.exists() else _compile(command, flags, path)
        if not failure:
            return Library(_load(command, flags, path), path, compiler, flags)
        first_failure = first_failure or failure
    raise BuildError(first_failure)


def _load(command: list[str], flags: tuple[str, ...], path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # a file that a crash or a full disk has spoilt is made again
        failure = _compile(command, flags, path)
    if failure:
        raise BuildError(failure)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the compiled kernel does not load: {error}") from error


def _compiler_version(command: list[str]) -> str:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C compiler {command[0]!r} does not run: {error}") from error
    if done.returncode:
        raise BuildError(f"the C compiler {command[0]!r} does not run: {_first_line(done.stderr or done.stdout)}")
    return _first_line(done.stdout)


def _fingerprint(command: list[str], compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in (SOURCE.name, *HEADERS):
        digest.update(SOURCE.with_name(name).read_bytes())
    digest.update(repr((command, compiler, BASE_FLAGS, flags, _processor())).encode())
    return digest.hexdigest()[:24]


def vendor_flags() -> tuple[str, ...]:
    """Those of this processor's maker; none where it does not say."""
    return VENDOR_FLAGS.get(_described().get("vendor_id", ""), ())


def _processor() -> tuple[str, ...]:
    """What `native` depends on: the model and its instruction sets."""
    return (platform.machine(), platform.processor(), *_described().values())


@cache
def _described() -> dict[str, str]:
    """What Linux says of the first processor; nothing elsewhere: the platform's own description has to do."""
    wanted = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.setdefault(name.strip(), value.strip())
    return found


def _compile(command: list[str], flags: tuple[str, ...], path: Path) -> str:
    """Compile into `path`, whole or not at all. Returns what went wrong, or nothing."""
    try:
        with whole_file(path) as temporary:
            arguments = [*command, *BASE_FLAGS, *flags, "-o", str(temporary), str(SOURCE), "-lm"]
            subprocess.run(arguments, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)
        return ""
    except subprocess.CalledProcessError as error:
        return f"{shlex.join([*command, *flags])} failed: {_first_error(error.stderr)}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shlex.join([*command, *flags])} failed: {error}"


def _first_error(text: str) -> str:
    return next((line for line in text.splitlines() if "error" in line.lower()), _first_line(text))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"
