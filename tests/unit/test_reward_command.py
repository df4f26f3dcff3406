"""`tlt reward score` scores a row with the rewards of its source."""

import json
from pathlib import Path
from typing import Any

import msgspec

from tests.in_process_cli import run_command

SPEC = """
reward:
  - {kind: numeric, sources: [gsm8k]}
  - {kind: boxed, sources: [math]}
"""


def parts(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    file = folder / "job.yaml"
    file.write_text(SPEC)
    done = run_command("reward", "score", str(file), *arguments, "--json")
    assert done.code == 0, done
    return [json.loads(line)["parts"] for line in done.stdout.splitlines()]


def test_scores_with_the_rewards_of_the_rows_source(tmp_path: Path) -> None:
    one = ("--completion", "7", "--answer", "7", "--row")
    assert parts(tmp_path, *one, '{"source": "gsm8k"}') == [{"numeric": 1.0, "boxed": None}]
    assert parts(tmp_path, *one, '{"source": "x"}') == [{"numeric": None, "boxed": None}]
    assert parts(tmp_path, *one, "{}") == [{"numeric": 1.0, "boxed": 0.0}]


def test_the_column_of_sources_may_have_another_name(tmp_path: Path) -> None:
    rows = [
        {"completion": "7", "answer": "7", "of": {"source": name}} for name in ("gsm8k", "math")
    ]
    data = tmp_path / "rows.jsonl"
    data.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    assert parts(tmp_path, "--data", str(data), "--source-key", "of.source") == [
        {"numeric": 1.0, "boxed": None},
        {"numeric": None, "boxed": 0.0},
    ]
