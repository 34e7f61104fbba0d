"""Result files: where they come from, how to make them again, and that they are whole or not there."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splitkv.bench import machine, record

SHA = "0123456789abcdef0123456789abcdef01234567"


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit of a package, whose folder is returned."""
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return package


def test_git_says_commit_and_dirty(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    tree = git(repository, "rev-parse", "HEAD:src/package")
    clean = {"commit": head, "dirty": False, "commit_source": "git", "tree": tree}
    assert record.provenance(folder=repository) == clean
    (repository / "__init__.py").write_text("changed = True\n")
    assert record.provenance(folder=repository)["dirty"] is True


def test_a_new_source_file_makes_it_dirty_and_a_new_result_does_not(repository: Path) -> None:
    results = repository.parents[1] / "results" / "h200"
    results.mkdir(parents=True)
    (results / "rungs.json").write_text("{}")
    assert record.provenance(folder=repository)["dirty"] is False
    (repository / "new.py").write_text("")
    assert record.provenance(folder=repository)["dirty"] is True


def test_without_git_everything_is_unknown(tmp_path: Path) -> None:
    assert record.provenance(folder=tmp_path) == {
        "commit": "unknown",
        "dirty": "unknown",
        "commit_source": "unknown",
        "tree": record.source_tree(tmp_path),
    }


def test_a_package_inside_another_repository_is_not_that_repository(repository: Path) -> None:
    installed = repository.parents[1] / ".venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert record.provenance(folder=installed)["commit"] == "unknown"


def test_a_repository_without_a_commit_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    assert record.provenance(folder=tmp_path)["commit"] == "unknown"


def test_without_git_the_callers_word_is_taken_and_marked(tmp_path: Path) -> None:
    said = record.provenance(SHA, dirty=False, folder=tmp_path)
    assert said == {"commit": SHA, "dirty": False, "commit_source": "option", "tree": record.source_tree(tmp_path)}
    assert record.provenance(SHA, folder=tmp_path)["dirty"] == "unknown"


def test_a_word_against_git_is_refused(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    assert record.provenance(head[:12], dirty=False, folder=repository)["commit_source"] == "git"
    with pytest.raises(ValueError, match=f"commit: expected {head} .* got {SHA}"):
        record.provenance(SHA, folder=repository)
    with pytest.raises(ValueError, match=r"dirty: expected --clean .* got --dirty"):
        record.provenance(dirty=True, folder=repository)


def test_the_tree_is_gits(repository: Path) -> None:
    (repository / "sub").mkdir()
    (repository / "sub" / "kernel.cu").write_bytes(bytes(range(256)))
    (repository / "sub.py").write_text("x = 1\n")  # git sorts the folder sub after it
    (repository / "run").write_text("#!/bin/sh\n")
    (repository / "run").chmod(0o755)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    (repository / "sub" / "__pycache__").mkdir()
    (repository / "sub" / "__pycache__" / "kernel.pyc").write_bytes(b"bytecode")
    assert record.source_tree(repository) == git(repository, "rev-parse", "HEAD:src/package")


def test_a_commit_with_its_tree_is_checked_against_the_files(repository: Path) -> None:
    """Where git knows another commit, or none: a copied working tree."""
    tree = record.source_tree(repository)
    said = record.provenance(f"{SHA}:{tree}", folder=repository)
    assert said == {"commit": SHA, "dirty": False, "commit_source": "tree", "tree": tree}
    with pytest.raises(ValueError, match=r"dirty: expected --clean .* got --dirty"):
        record.provenance(f"{SHA}:{tree}", dirty=True, folder=repository)
    (repository / "__init__.py").write_text("changed = True\n")
    with pytest.raises(ValueError, match=f"commit: expected the tree [0-9a-f]{{40}} of the files here, got {tree}"):
        record.provenance(f"{SHA}:{tree}", folder=repository)


@pytest.mark.parametrize("text", ["", "main", "abc", "g" * 40, SHA + "0"])
def test_a_commit_is_hexadecimal(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="commit: expected 7 to 40 hexadecimal digits"):
        record.provenance(text, folder=tmp_path)


def test_the_command_holds_every_option_and_our_variables() -> None:
    options = {"lengths": (64, 128), "full": True, "json": False, "kv_dtype": None, "out": Path("a b.json")}
    environ = {"SPLITKV_POLICY": "pinned(4)", "HOME": "/root"}
    command = record.command_line("rungs", options, environ)
    assert command == "SPLITKV_POLICY='pinned(4)' splitkv rungs --lengths 64,128 --full --out 'a b.json'"
    assert record.command_line("doctor", {"json": True}, {}) == "splitkv doctor --json"


def test_a_new_record_names_the_machine() -> None:
    source = {"commit": "unknown", "dirty": "unknown", "commit_source": "unknown"}
    made = record.new_record("splitkv.test.v1", "splitkv test", source, "cpu")
    assert made["schema"] == "splitkv.test.v1" and made["command"] == "splitkv test"
    assert "gpu" not in made and made["cpu"] and made["cores"] >= 1
    assert set(made["versions"]) == {"python", "torch", "triton", "numpy", "splitkv", "driver", "cuda"}
    assert 0 < made["memory_free_bytes"] <= made["memory_total_bytes"]
    assert made["memory_pages"] == machine.memory_pages()


def test_json_is_valid_and_rounded() -> None:
    text = record.to_json({"us": 1 / 3, "bad": [math.nan, math.inf], "count": 2**53 + 1, "flag": True})
    assert json.loads(text) == {"us": 0.333333, "bad": [None, None], "count": 2**53 + 1, "flag": True}


def test_a_record_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "rungs.json"
    record.write_record(path, {"rows": []})
    record.write_record(path, {"rows": [1]})
    assert json.loads(path.read_text()) == {"rows": [1]}
    assert [file.name for file in path.parent.iterdir()] == ["rungs.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rungs.json"
    record.write_record(path, {"rows": ["old"]})
    with pytest.raises(TypeError):
        record.write_record(path, {"rows": [object()]})

    def no_space(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(record.os, "fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        record.write_record(path, {"rows": ["new"]})
    assert json.loads(path.read_text()) == {"rows": ["old"]}
    assert [file.name for file in tmp_path.iterdir()] == ["rungs.json"]


def test_an_unwritable_target_is_refused_beforehand(tmp_path: Path) -> None:
    record.require_writable(tmp_path / "not" / "yet" / "there.json")
    with pytest.raises(ValueError, match="out: expected a file"):
        record.require_writable(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="out: expected a file"):
        record.require_writable(tmp_path / "file" / "rungs.json")


def test_commands_that_fail_or_are_missing_give_nothing() -> None:
    assert machine.output_of(["no-such-command-of-ours"]) is None
    assert machine.output_of(["git", "no-such-verb"]) is None
    assert machine.package_version("no-such-distribution-of-ours") is None


def test_other_processes_are_measured_and_our_own_work_is_not() -> None:
    neighbours = machine.Neighbours()
    before = time.process_time()
    while time.process_time() - before < 0.3:
        pass
    cores = neighbours.cores()
    assert cores is not None and 0 <= cores < machine.usable_cores()


def test_a_child_that_ended_is_our_own() -> None:
    before = machine.Neighbours._reading()
    work = "import time\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", work], check=True)
    after = machine.Neighbours._reading()
    assert before is not None and after is not None and after[2] - before[2] >= 0.35
