"""Run a task that TLT was not tuned on: examples/brief_sums, as its README says.

`python -m benchmarks.second_task --out F.json`
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.result import Claim, write_result

_SPEC = Path(__file__).resolve().parent.parent / "examples" / "brief_sums" / "job.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as folder:
        began = time.monotonic()
        command = ["demo", "--spec", str(_SPEC), "--runs", f"{folder}/runs"]
        subprocess.run(
            [sys.executable, "-m", "cli.main", *command],
            env={**os.environ, "TLT_HOME": f"{folder}/home"},
            check=True,
        )
        seconds = time.monotonic() - began
        (file,) = Path(folder).glob("runs/*/summary.json")
        summary = json.loads(file.read_text())
    gain = summary["eval_after"] - summary["eval_before"]
    stderr = math.hypot(summary["eval_after_stderr"], summary["eval_before_stderr"])
    claims = [
        Claim(name="second_task.gain", value=gain / stderr, unit="std errors", bar=2.0),
    ]
    write_result("second_task", claims, {"summary": summary}, seconds, out)


if __name__ == "__main__":
    main()
