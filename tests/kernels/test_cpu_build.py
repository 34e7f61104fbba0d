"""Compiling and caching the CPU kernel, and what happens where that does not work."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from splitkv.backends import cpu, cpu_build
from splitkv.backends.cpu_build import BuildError, load_library

REAL = "cc"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own, and no optimisation, which takes most of the compiler's time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_build, "BASE_FLAGS", ("-std=gnu11", "-O0", "-w", "-fPIC", "-shared"))
    return tmp_path / "cache" / "splitkv"


@pytest.fixture
def small(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of one function, which compiles at once: for what happens to any library."""
    source = tmp_path / "source" / cpu_build.SOURCE.name
    source.parent.mkdir()
    source.write_text("long splitkv_cpu_call_bytes(void) { return 48; }\n")
    for name in cpu_build.HEADERS:
        source.with_name(name).touch()
    monkeypatch.setattr(cpu_build, "SOURCE", source)


def compiler(folder: Path, body: str) -> str:
    """A compiler that notes each compilation in `calls`, then runs `body` (shell; "$@" are the arguments)."""
    script = folder / "compiler"
    version = 'if [ "$1" = --version ]; then echo "made-up 1.0"; exit 0; fi'
    script.write_text(f'#!/bin/sh\n{version}\necho "$@" >> {folder}/calls\n{body}\n')
    script.chmod(0o755)
    return str(script)


def compilations(folder: Path) -> int:
    calls = folder / "calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_second_load_does_not_compile(
    small: None, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, f'exec {REAL} "$@"'))
    first = load_library()
    assert compilations(tmp_path) == 1 and first.compiler == "made-up 1.0" and first.flags == cpu_build.FLAG_LADDER[0]
    assert load_library().path == first.path and compilations(tmp_path) == 1
    assert [path.name for path in cache.iterdir()] == [first.path.name]


def test_what_shapes_the_library_names_it(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = cpu_build.FLAG_LADDER[0]
    names = {cpu_build._fingerprint([REAL], "12.2", flags)}
    names.add(cpu_build._fingerprint(["other"], "12.2", flags))
    names.add(cpu_build._fingerprint([REAL], "12.3", flags))
    names.add(cpu_build._fingerprint([REAL], "12.2", ()))
    monkeypatch.setattr(cpu_build, "_processor", lambda: ("another",))
    names.add(cpu_build._fingerprint([REAL], "12.2", flags))
    monkeypatch.undo()
    for name in (cpu_build.SOURCE.name, *cpu_build.HEADERS):
        (tmp_path / name).write_bytes(cpu_build.SOURCE.with_name(name).read_bytes())
    (tmp_path / cpu_build.HEADERS[0]).write_text("changed")
    monkeypatch.setattr(cpu_build, "SOURCE", tmp_path / cpu_build.SOURCE.name)
    names.add(cpu_build._fingerprint([REAL], "12.2", flags))
    assert len(names) == 6


def test_every_header_counts() -> None:
    folder = cpu_build.SOURCE.parent
    assert set(cpu_build.HEADERS) == {path.name for path in folder.glob("cpu_*.h")}


def test_a_compiler_without_openmp_gives_one_thread(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = f'case "$*" in *-fopenmp*) echo "error: no -fopenmp here" >&2; exit 1;; esac\nexec {REAL} "$@"'
    monkeypatch.setenv("CC", compiler(tmp_path, refuse))
    library = load_library()
    assert "-fopenmp" not in library.flags and not library.functions.splitkv_cpu_has_threads()
    monkeypatch.setattr(cpu, "_library", lambda: library)
    library.functions.splitkv_cpu_isa.restype = cpu.ctypes.c_char_p
    kind, detail = cpu.cpu_status()
    assert kind == "native" and "one thread" in detail


@pytest.mark.parametrize(
    "command, reason",
    [
        ("/no/such/compiler", "does not run"),
        ("false", "does not run"),
        ("{failing}", "error: the disk is on fire"),
        ("{lying}", "does not load"),
    ],
)
def test_why_there_is_no_library(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, reason: str
) -> None:
    failing = {"{failing}": 'echo "error: the disk is on fire" >&2; exit 1', "{lying}": "exit 0"}.get(command)
    monkeypatch.setenv("CC", compiler(tmp_path, failing) if failing else command)
    with pytest.raises(BuildError, match=reason):
        load_library()
    assert not list(cache.glob("*.tmp")) if cache.exists() else True


def test_a_spoilt_file_is_made_again(small: None, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, f'exec {REAL} "$@"'))
    command = [str(tmp_path / "compiler")]
    cache.mkdir(parents=True)
    name = cpu_build._fingerprint(command, "made-up 1.0", cpu_build.FLAG_LADDER[0])
    (cache / f"cpu-{name}.so").write_bytes(b"\x7fELF and then nothing")
    assert load_library().functions.splitkv_cpu_call_bytes() == 48 and compilations(tmp_path) == 1


def test_a_cache_that_cannot_be_written_costs_a_compilation(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert load_library().path.parent.name.startswith("splitkv-")


BACKENDS = Path(cpu_build.__file__).parent
BUILD_ALONE = f"""
import importlib, sys, types
for name, folder in (("alone", {str(BACKENDS.parent)!r}), ("alone.backends", {str(BACKENDS)!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
module = importlib.import_module("alone.backends.cpu_build")
module.BASE_FLAGS = ("-std=gnu11", "-O0", "-w", "-fPIC", "-shared")
module.SOURCE = type(module.SOURCE)(sys.argv[1])
print(module.load_library().path)
"""


def test_processes_that_build_together(small: None, cache: Path) -> None:
    command = [sys.executable, "-c", BUILD_ALONE, str(cpu_build.SOURCE)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert paths == {str(path) for path in cache.iterdir()}


def test_without_a_compiler_the_fallback_answers_after_one_warning(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import warnings
        import torch
        import splitkv
        from splitkv.backends.cpu import cpu_status

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                out = splitkv.decode_attention(torch.ones(1, 2, 16), *torch.ones(2, 1, 8, 1, 16), 5)
        print(cpu_status()[0], out.unique().tolist(), len(caught), caught[0].message)
    """)
    environment = os.environ | {"CC": "/no/such/compiler", "XDG_CACHE_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(cpu.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("fallback [1.0] 1 "), done
    assert "/no/such/compiler" in done.stdout and "slow" in done.stdout


@pytest.mark.parametrize(("isa", "needs"), [("avx512", {"avx512f", "avx512bw", "avx512dq"}), ("avx2", {"avx2", "fma"})])
def test_a_processor_gets_the_kernel_of_its_instructions(isa: str, needs: set[str]) -> None:
    """A mistake in one instruction set's code would else go unnoticed: the next flags compile without it."""
    info = Path("/proc/cpuinfo")
    features = set(info.read_text().split()) if info.exists() else set()
    if not needs <= features or (isa == "avx2" and "avx512f" in features) or cpu.cpu_status()[0] != "native":
        pytest.skip(f"no {isa}, or a better one, or no compiler")
    assert cpu.cpu_status()[1].startswith(f"{isa}, OpenMP")


@pytest.mark.parametrize("flags", [(), ("-DAMD",)], ids=["others", "amd"])
def test_the_kernels_for_other_makers_processors_are_right_here(flags: tuple[str, ...]) -> None:
    """Both ways to multiply bf16 and fp8, whichever of them this processor would be given."""
    program = textwrap.dedent(f"""
        import itertools
        import torch
        from splitkv import decode_attention, reference_attention
        from splitkv.backends import cpu, cpu_build

        cpu_build.vendor_flags = lambda: {flags}
        assert cpu.cpu_status()[0] == "native" and ("-DAMD" in cpu._library().flags) == ("-DAMD" in {flags})
        torch.manual_seed(0)
        dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
        for dim, dtype in itertools.product((64, 80, 96, 256), dtypes):
            for heads in (8, 14):
                q = torch.randn(2, heads, dim, dtype=torch.bfloat16)
                k, v = (torch.randn(2, 300, 2, dim).to(dtype) for _ in range(2))
                lens = torch.tensor([300, 77], dtype=torch.int32)
                want = reference_attention(q, k, v, lens)
                error = (decode_attention(q, k, v, lens).double() - want).norm() / want.norm()
                assert error < 3e-3, (dim, dtype, heads, error)
    """)
    environment = os.environ | {"PYTHONPATH": str(Path(cpu.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
