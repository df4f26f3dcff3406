"""The whole road: `tlt demo` on this machine, from nothing to a better policy.

`python -m benchmarks.bench_road --out F.json`
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.result import Claim, write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as folder:
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "cli.main", "demo", "--runs", f"{folder}/runs"],
            env={**os.environ, "TLT_HOME": f"{folder}/home"},
            check=True,
        )
        seconds = time.monotonic() - began
        (file,) = Path(folder).glob("runs/*/summary.json")
        summary = json.loads(file.read_text())
    gain = 100 * (summary["eval_after"] - summary["eval_before"])
    stderr = 100 * (summary["eval_after_stderr"] ** 2 + summary["eval_before_stderr"] ** 2) ** 0.5
    claims = [
        Claim(name="demo.accuracy.gain", value=gain, unit="points", bar=15.0),
        Claim(
            name="demo.accuracy.gain.stderrs", value=gain / stderr, unit="standard errors", bar=2.0
        ),
        Claim(name="demo.seconds", value=seconds, unit="s", bar=900.0, less_is_better=True),
    ]
    write_result("road", claims, {"summary": summary}, seconds, out)


if __name__ == "__main__":
    main()
