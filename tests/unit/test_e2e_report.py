"""`splitkv report` of a file of `bench e2e`: figures, a table of every row, and what was not measured."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from splitkv.bench import e2e_report, report
from splitkv.bench.summary import OURS, UNSPLIT

RUNGS = Path(__file__).resolve().parents[2] / "results" / "h200" / "rungs.json"
FLIP = {"row": 0, "step": 3, "margin": 0.01, "split_rms": 0.02, "unsplit_rms": 0.03, "explained": True}
DEPTHS = (4096, 60_000, 262_080)


def row(geometry: str, kv_dtype: str, batch: int, depth: int, contender: str, **changes: Any) -> dict[str, Any]:
    """A made-up row: ours 30 % over a floor of 3.6 ms of weights and what the keys take, unsplit far above."""
    size = {"bf16": 2, "fp8_e4m3": 1}[kv_dtype]
    floor = 3.6 + batch * depth * 16_384 * size / 4.4e9
    ms = 1.3 * floor if contender == OURS else 1.3 * floor + depth / 5000
    found = {"geometry": geometry, "kv_dtype": kv_dtype, "batch": batch, "depth": depth, "contender": contender}
    found |= {"ms_per_token": ms, "ms_p20": 0.99 * ms, "ms_p80": 1.01 * ms, "floor_ms": floor, "passed": True}
    found |= {"percent_of_floor": 100 * floor / ms, "tokens_s": batch * 1000 / ms, "tokens_identical": True}
    return {**found, "flips": [], "cache": "prefilled" if depth == 4096 else "filled", **changes}


def e2e_file(folder: Path) -> Path:
    names = [(g, kv, b) for g in ("qwen3.5-9b", "qwen3.5-4b") for kv in ("bf16", "fp8_e4m3") for b in (1, 16)]
    rows = [row(*name, depth, contender) for name in names for depth in DEPTHS for contender in (OURS, UNSPLIT)]
    rows[0] |= {"tokens_identical": False, "flips": [FLIP]}
    nothing = {"ms_per_token": None, "percent_of_floor": None, "tokens_s": None, "passed": False}
    rows[2] |= nothing
    stored = {"kv_dtype": "q8_0", "weights": None, "ms_per_token": 33.33}
    rows += [row("qwen3.5-9b", "fp8_e4m3", 1, depth, "llama.cpp") | stored for depth in DEPTHS]
    rows.append(rows[-1] | {"weights": "q4_1", "ms_per_token": 44.44})  # from another file than ours
    kernels = [
        {"name": f"kernel_{n}<bf16>", "added_us": 900 / (n + 1), "us": 1000 / (n + 1), "launches": 32}
        for n in range(20)
    ]
    profile = {
        "geometry": "qwen3.5-9b",
        "kv_dtype": "bf16",
        "batch": 1,
        "step_us": 4700,
        "busy_us": 3700,
        "other_us": 100,
    }
    parity = {"geometry": "qwen3.5-9b", "batch": 1, "relative": 0.001}
    head = json.loads(RUNGS.read_text()) | {
        "schema": report.E2E,
        "rows": rows,
        "profiles": [{**profile, "depth": depth, "kernels": kernels} for depth in (4096, 262_080)],
        "kv_parity": [{**parity, "kv_dtype": "f16", "depth": 4096}, {**parity, "kv_dtype": "f16", "relative": 0.25}],
        "not_measured": [{"geometry": "qwen3.5-9b", "batch": 16, "reason": "1 GB > <what is free>"}],
    }
    path = folder / "e2e.json"
    path.write_text(json.dumps(head))
    return path


def test_the_figures_are_pictures_of_some_size(tmp_path: Path) -> None:
    written = report.write_report([report.load(e2e_file(tmp_path))], tmp_path / "r.html", tmp_path)
    assert [path.name for path in written[1:]] == ["e2e-steps.png", "e2e-kernels.png"]
    for path in written[1:]:
        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and width > 500 and height > 500


def test_the_page_tells_every_depth_and_escapes_what_it_quotes(tmp_path: Path) -> None:
    record = report.load(e2e_file(tmp_path))
    page = report.page([record], {record.name: []})
    assert page.count("<tr") == 1 + 2 + 24  # a head, two geometries, 24 depths with both contenders in a line
    assert "failed" in page and "1 of 1 flip" in page and "margin 0.01 in float64" in page and "explained" in page
    assert page.count("33.33") == 3 and "44.44" not in page
    assert "1 GB &gt; &lt;what is free&gt;" in page and "relative difference up to 2.5e-01" in page


def test_totals_count_what_the_rows_say(tmp_path: Path) -> None:
    record = report.load(e2e_file(tmp_path))
    total = report.totals([record])["records"]["e2e"]
    assert total == {"rows": 48, "timed": 47, "compared": 24, "identical": 23}
    assert ("47 of 48", "rows right and timed") in e2e_report.cards(record.data)


def test_one_depth_makes_no_line_and_an_e2e_file_stands_beside_others(tmp_path: Path) -> None:
    path = e2e_file(tmp_path)
    data = json.loads(path.read_text())
    data["rows"], data["profiles"] = [r for r in data["rows"] if r["depth"] == 60_000], []
    path.write_text(json.dumps(data))
    records = [report.load(path), report.load(RUNGS)]
    written = report.write_report(records, tmp_path / "r.html", tmp_path / "png")
    assert not any(path.name.startswith("e2e") for path in written) and len(written) > 1
    assert set(report.totals(records)["records"]) == {"e2e", "rungs"}
