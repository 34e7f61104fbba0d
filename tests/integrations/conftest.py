"""What the tests of the transformers integration share: the registered name and a record of the kernel's calls."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from splitkv.integrations import transformers as integration

FLA = "flash-linear-attention is installed, whose Triton kernels transformers would call on the CPU too"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("fla") is not None:
        for item in items:
            if Path(__file__).parent in item.path.parents and "qwen3.5" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=FLA))


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of every decode_attention that the integration made."""
    made: list[dict[str, Any]] = []
    original = integration.decode_attention

    def record(q: Any, k_cache: Any, v_cache: Any, seq_lens: Any, **options: Any) -> Any:
        made.append(dict(q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, **options))
        return original(q, k_cache, v_cache, seq_lens, **options)

    monkeypatch.setattr(integration, "decode_attention", record)
    return made
