"""`tlt bench` shows every benchmark of the catalogue, and every committed result."""

import subprocess
import sys

from benchmarks.catalogue import BENCHMARKS
from tests.call_paths import ROOT


def test_shows_all_benchmarks_and_all_results() -> None:
    command = [sys.executable, "-m", "cli.main", "bench"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    names = list(dict.fromkeys(line.split()[0] for line in shown.splitlines()[1:]))
    assert [name for name in names if name in BENCHMARKS] == list(BENCHMARKS)
    assert {file.stem for file in (ROOT / "benchmarks" / "results").glob("*.json")} <= set(names)
    assert names[names.index("speculation") + 1] == "speculation_16"
