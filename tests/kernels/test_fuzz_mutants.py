"""The fuzzer against the C kernel itself with one fault planted in its source: each must be found in 600 cases."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from splitkv import attention
from splitkv.backends import cpu, cpu_build
from splitkv.bench.fuzz.checks import check
from splitkv.bench.fuzz.draw import draw_case
from splitkv.prepared import CallMemo

CASES = 600
MUTANTS = {
    "parts joined without rescaling": (
        "cpu_tree.h",
        "vset1(exp2_of(sa[0] - base)), weight_b = vset1(exp2_of(sb[0] - base))",
        "vset1(1.0f), weight_b = vset1(1.0f)",
    ),
    "window one key short": ("cpu_call.h", "end - call->window) : row->start", "end - call->window + 1) : row->start"),
    "page id clamped, not checked": (
        "cpu_call.h",
        "load_integer(at3(table, b, logical, 0), table->dtype)",
        "min64(max64(load_integer(at3(table, b, logical, 0), table->dtype), 0), call->num_pages - 1)",
    ),
    "V's scale for K": ("cpu_attend.h", "load_number(at3(&call->k_scale, head", "load_number(at3(&call->v_scale, head"),
    "V's heads taken for neighbours": (
        "cpu_attend.h",
        "int64_t offset = (task->first_head + h) * call->v.stride[2]",
        "int64_t offset = (task->first_head + h) * call->v_head_dim * item_bytes[call->v.dtype]",
    ),
    "splits follow the load": (
        "cpu_call.h",
        "row->split_len = max64(call->rule_min_len, wanted);",
        "row->split_len = max64(call->rule_min_len, wanted) + 32 * (units > 4);",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernel's sources that backend "cpu" compiles and runs until the test is over."""
    if cpu.cpu_status()[0] != "native":
        pytest.skip("no C compiler")
    for name in (cpu_build.SOURCE.name, *cpu_build.HEADERS):
        shutil.copy(cpu_build.SOURCE.with_name(name), tmp_path)
    monkeypatch.setattr(cpu_build, "SOURCE", tmp_path / cpu_build.SOURCE.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick = tuple("-O0" if flag == "-O3" else flag for flag in cpu_build.BASE_FLAGS)  # to compile, not to run
    monkeypatch.setattr(cpu_build, "BASE_FLAGS", quick)
    cpu._library.cache_clear()
    monkeypatch.setattr(attention, "_CALLS", CallMemo())  # calls prepared before run the library of then
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    cpu._library.cache_clear()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_in_the_kernel_is_found(mutant: str, folder: Path) -> None:
    name, right, wrong = MUTANTS[mutant]
    text = (folder / name).read_text()
    assert text.count(right) == 1, "the kernel has changed: plant this fault anew"
    (folder / name).write_text(text.replace(right, wrong))
    assert str(folder) in cpu.cpu_status()[1]
    assert any(check(draw_case(12, index), "cpu", "cpu").failures for index in range(CASES))
