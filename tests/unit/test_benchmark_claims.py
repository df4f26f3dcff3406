"""`tlt bench` and docs/benchmarks.md show every committed result, and how old it is."""

import subprocess
import sys
from pathlib import Path

from benchmarks.catalogue import BENCHMARKS
from docs.generate import MOST_COMMITS, git, old_mark
from tests.call_paths import ROOT


def test_shows_all_benchmarks_and_all_results() -> None:
    command = [sys.executable, "-m", "cli.main", "bench"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    names = list(dict.fromkeys(line.split()[0] for line in shown.splitlines()[1:]))
    assert [name for name in names if name in BENCHMARKS] == list(BENCHMARKS)
    assert {file.stem for file in (ROOT / "benchmarks" / "results").glob("*.json")} <= set(names)
    assert names[names.index("speculation") + 1] == "speculation_16"


def test_marks_results_that_are_many_commits_old(tmp_path: Path) -> None:
    def commit(*arguments: str) -> str:
        author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        git(tmp_path, *author, "commit", "--quiet", "--message=x", *arguments)
        return git(tmp_path, "rev-parse", "HEAD")

    file = tmp_path / "result.json"
    file.touch()
    assert old_mark("unknown", file, tmp_path) == ""  # no history
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "result.json")
    oldest = commit()
    old = commit("--allow-empty")
    for _ in range(MOST_COMMITS):
        commit("--allow-empty")
    assert old_mark(oldest, file, tmp_path)
    assert old_mark(f"{oldest}+changes", file, tmp_path)
    assert old_mark(old, file, tmp_path) == ""
    # its commit is gone, but the file has changed as little as that
    assert old_mark("0" * 40, file, tmp_path)
    file.write_text("{}")
    commit("--all")
    assert old_mark("0" * 40, file, tmp_path) == ""
