"""What all tests share: GPU tests are skipped where there is no CUDA device, and their number is printed."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

GPU_TESTS = Path(__file__).parent / "gpu"
NO_GPU = "no CUDA device"

# A first call may compile a kernel, so an example has no deadline. CI draws the same examples every time.
settings.register_profile("splitkv", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("splitkv")


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_collected() -> None:
    """What torch and the tests before have made lives on: to search a million objects again takes a quarter second,
    and the end-to-end benchmarks alone collect a hundred times."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = not torch.cuda.is_available()
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = sum(str(report.longrepr).count(NO_GPU) for report in terminalreporter.getreports("skipped"))
    if skipped:
        terminalreporter.write_line(f"GPU tests skipped: {skipped} ({NO_GPU})")
