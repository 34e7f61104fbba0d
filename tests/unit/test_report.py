"""`splitkv report`: one page that needs nothing else, PNGs that are pictures, and refusals that name the file."""

import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from splitkv.bench import plots, report

RUNGS = Path(__file__).resolve().parents[2] / "results" / "h200" / "rungs.json"
FIELDS = {"batch": 1, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "kv_dtype": "bf16"}


def row(group: str, seq_len: int, **changes: Any) -> dict[str, Any]:
    """A made-up row: ours 2 us and 1 % over the floor, a peer at 9, one whose error is ten times ours."""
    case = {**FIELDS, "group": group, "seq_len": seq_len, "capacity": seq_len, "page_size": None, "q_len": 1, **changes}
    floor = case["batch"] * case["num_kv_heads"] * seq_len / 8e4
    us = {"splitkv": 1.01 * floor + 2, "sdpa-cudnn": 1.05 * floor + 9, "fa3": floor + 8}
    err = {"splitkv": 1.6e-3, "sdpa-cudnn": 2e-3, "fa3": 1.6e-2}
    if group.startswith("cost"):
        us, err = {"splitkv": us["splitkv"]}, {"splitkv": err["splitkv"]}
    name = f"{group} {case['batch']}, {case['num_kv_heads']}, {seq_len}"
    more = {"case": name, "floor_us": floor, "goal_us": 1.01 * floor + 3, "us": us, "err": err, "passed": True}
    return {**case, **more, "not_run": {"flex": "takes <milliseconds>"}}


def attention_file(folder: Path) -> Path:
    rows = [row("table", n) for n in (4096, 32_768, 131_072)] + [row("pages", 4096, page_size=16)]
    rows += [row("cost-length", n) for n in (4096, 65_536, 262_144)]
    rows += [row("cost-batch", 8192, batch=n) for n in (1, 8, 64)]
    rows += [row("cost-capacity", 4096, capacity=n) for n in (4096, 262_144)]
    rows.append({**row("table", 20_000), "us": {}, "err": {"splitkv": 0.5}, "passed": False})
    head = json.loads(RUNGS.read_text())
    head |= {"schema": report.ATTENTION, "rows": rows, "goal": "1.01 x floor + 3 us", "skipped": []}
    path = folder / "attention.json"
    path.write_text(json.dumps(head))
    return path


class Sources(HTMLParser):
    """Every address that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report.html"
    written = report.write_report([report.load(attention_file(tmp_path)), report.load(RUNGS)], out, tmp_path / "png")
    page = out.read_text()
    parser = Sources()
    parser.feed(page)
    assert parser.found and all(source.startswith("data:image/png;base64,") for source in parser.found)
    assert "url(" not in page and "<script" not in page
    names = {path.name for path in written}
    assert {"attention-time.png", "attention-cases.png", "attention-cost.png", "rungs-bandwidth.png"} <= names
    assert len(parser.found) == len(names) - 1


def test_every_png_is_a_picture_of_some_size(tmp_path: Path) -> None:
    written = report.write_report([report.load(attention_file(tmp_path))], tmp_path / "r.html", tmp_path)
    for path in written[1:]:
        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and width > 500 and height > 300


def test_the_page_tells_every_row_and_escapes_what_it_quotes(tmp_path: Path) -> None:
    record = report.load(attention_file(tmp_path))
    page = report.page([record], {record.name: []})
    assert page.count("<tr") == 1 + len({r["group"] for r in record.rows}) + len(record.rows)
    assert "takes &lt;milliseconds&gt;" in page and "<milliseconds>" not in page
    assert "failed" in page and "fa3 *" in page


def test_the_page_says_how_straight_time_is(tmp_path: Path) -> None:
    record = report.load(attention_file(tmp_path))
    page = report.page([record], {record.name: []})
    assert re.search(r"cost-length: .*R² = 1\.00000", page) and re.search(r"cost-batch: .*R² = 1\.00000", page)
    assert "cost-capacity: 0.00 µs between" in page


def test_totals_count_what_the_rows_say(tmp_path: Path) -> None:
    record = report.load(attention_file(tmp_path))
    total = report.totals([record])["records"]["attention"]
    cost = total.pop("cost")
    assert total == {"rows": 13, "timed": 12, "ahead": 4, "compared": 4, "at_goal": 4, "goals": 5}
    assert len(cost) == 3


def test_rows_of_one_shape_make_a_series_if_there_are_two(tmp_path: Path) -> None:
    series = report.series_of(report.load(attention_file(tmp_path)).rows)
    assert list(series) == ["32/8 × 128, bf16"]
    assert report.series_of([row("table", 4096), row("table", 4096)]) == {}


def test_the_same_contender_has_the_same_colour_in_every_figure() -> None:
    few = plots.colours_of([row("table", 4096)])
    assert few["splitkv"] == plots.BLUE and len(set(few.values())) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a result file"),
        ("[]", "expected schema"),
        ('{"schema": "other.v1", "rows": [1]}', "got 'other.v1'"),
        ('{"schema": "splitkv.rungs.v1", "rows": []}', "expected rows"),
    ],
)
def test_what_is_no_result_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="results: expected") as caught:
        report.load(path)
    assert message in str(caught.value) and "some.json" in str(caught.value)


def test_files_without_figures_are_left_out_of_a_folder(tmp_path: Path) -> None:
    for name in ("fuzz", "rungs"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"schema": f"splitkv.{name}.v1", "rows": [{}]}))
    records, left_out = report.load_all(sorted(tmp_path.glob("*.json")))
    assert [record.name for record in records] == ["rungs"]
    assert len(left_out) == 1 and "fuzz.json" in left_out[0]
    with pytest.raises(ValueError, match=r"fuzz\.json"):
        report.load_all([tmp_path / "fuzz.json"])


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json"):
        report.load(tmp_path / "none.json")


def test_two_files_of_one_name_keep_their_figures_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "rungs.json", tmp_path / "b" / "rungs.json"
    for path in (first, second):
        path.parent.mkdir()
        path.write_text(RUNGS.read_text())
    with pytest.raises(ValueError, match="different names"):
        report.write_report([report.load(first), report.load(second)], tmp_path / "r.html")
