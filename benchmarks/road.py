"""Time a newcomer's first steps: a fresh clone, an empty home, `make demo`.

Then Transformers loads the exported policy and answers the same problems with its own sampler.
`python -m benchmarks.road --out F.json`
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
from typing import Any

from benchmarks.result import Claim, write_result
from examples.tiny_reasoner.task import reward

_ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as folder:
        began = time.monotonic()
        clone = Path(folder) / "tlt"
        subprocess.run(["git", "clone", "--quiet", str(_ROOT), str(clone)], check=True)
        _make(clone, "setup", Path(folder))
        set_up = time.monotonic() - began
        _make(clone, "demo", Path(folder))
        seconds = time.monotonic() - began
        (run,) = (clone / "runs").iterdir()
        summary = json.loads((run / "summary.json").read_text())
        exported = Path(folder) / "exported"
        export = [sys.executable, "-m", "cli.main", "export", "policy", str(run), str(exported)]
        subprocess.run(export, check=True)
        mean, stderr = _transformers_score(exported, summary["eval_problems"])
    gain = 100 * (summary["eval_after"] - summary["eval_before"])
    gain_stderr = 100 * math.hypot(summary["eval_after_stderr"], summary["eval_before_stderr"])
    apart = abs(mean - summary["eval_after"]) / math.hypot(stderr, summary["eval_after_stderr"])
    claims = [
        Claim(name="demo.accuracy.gain", value=gain, unit="points", bar=15.0),
        Claim(
            name="demo.accuracy.gain.noise", value=gain / gain_stderr, unit="std errors", bar=3.0
        ),
        Claim(
            name="demo.fresh_clone.seconds", value=seconds, unit="s", bar=900, less_is_better=True
        ),
        Claim(
            name="demo.export.difference",
            value=apart,
            unit="std errors",
            bar=3.0,
            less_is_better=True,
        ),
    ]
    details = {
        "summary": summary,
        "set_up_seconds": round(set_up, 1),
        "transformers": {"mean": mean, "stderr": stderr},
    }
    write_result("road", claims, details, seconds, out)


def _make(clone: Path, target: str, home: Path) -> None:
    """Run make with an empty home: without caches and sessions of the caller."""
    environment = {key: value for key, value in os.environ.items() if key != "TLT_HOME"}
    environment |= {"HOME": str(home), "PIP_NO_CACHE_DIR": "1"}
    subprocess.run(["make", target], cwd=clone, env=environment, check=True)


def _transformers_score(folder: Path, problems: int) -> tuple[float, float]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    data = (_ROOT / "examples" / "tiny_reasoner" / "data" / "eval.jsonl").read_text()
    rows = [json.loads(line) for line in data.splitlines()][: min(problems, 256)]
    scores: list[float] = []
    for start in range(0, len(rows), 128):
        batch = rows[start : start + 128]
        inputs = tokenizer([row["prompt"] for row in batch], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        tokens = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=760)
        answers = tokenizer.batch_decode(
            tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        scores += [reward(a, row["answer"]) for a, row in zip(answers, batch, strict=True)]
    mean = math.fsum(scores) / len(scores)
    return mean, math.sqrt(mean * (1 - mean) / (len(scores) - 1))


if __name__ == "__main__":
    main()
