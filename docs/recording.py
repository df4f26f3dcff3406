"""Keep what the dashboard folds of a finished run, small enough for the repository.

    python docs/recording.py runs/tiny-reasoner-1

Log-probs are left out, and so are the answers of all but two steps.
"""

import gzip
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tlt.blobs.answer_files import AnswerFiles, AnswerWriter
from tlt.protocol.refs import AnswerRef

RECORDED = Path(__file__).parent / "recorded"
_ROOT = Path(__file__).resolve().parent.parent
_MODEL = "examples/tiny_reasoner/model"
_SHOWN_STEPS = (3, 7)
_Copy = Callable[[list[Any]], list[Any]]


def record(run: Path) -> None:
    spec = (run / "spec.json").read_text()
    checkout = json.loads(spec)["policy"]["path"].removesuffix(_MODEL)

    def here(text: str) -> str:
        """Replace the absolute paths of the machine that ran it."""
        return text.replace(f"{run.parent}/", "runs/").replace(checkout, "")

    shown: set[int] = set()
    lines = (run / "journal.jsonl").read_text().splitlines()
    with tempfile.TemporaryDirectory() as folder:
        kept = AnswerFiles(Path(folder))
        copy = partial(_copied, AnswerFiles(run), kept.writer("shown"))
        entries = [_stripped(json.loads(line), shown, copy) for line in lines]
        content = (kept.folder / "shown").read_bytes()
    _write("journal.jsonl", [here(entry) for entry in entries])
    (RECORDED / "answers.gz").write_bytes(gzip.compress(content, 9, mtime=0))
    prompts = (run / "data" / "train.jsonl").read_text().splitlines()
    _write("train.jsonl", [row if index in shown else "" for index, row in enumerate(prompts)])
    (RECORDED / "spec.json").write_text(here(spec))


def unpack(run: Path) -> Path:
    """Write the recording as a run's folder."""
    (run / "data").mkdir(parents=True)
    (run / "journal.jsonl").write_bytes(_read("journal.jsonl"))
    (run / "data" / "train.jsonl").write_bytes(_read("train.jsonl"))
    (run / "answers").mkdir()
    (run / "answers" / "shown").write_bytes(gzip.decompress((RECORDED / "answers.gz").read_bytes()))
    spec = json.loads((RECORDED / "spec.json").read_bytes())
    spec["policy"]["path"] = str(_ROOT / _MODEL)
    (run / "spec.json").write_text(json.dumps(spec))
    return run


def _stripped(entry: dict[str, dict[str, Any]], shown: set[int], copy: _Copy) -> str:
    event = entry["event"]
    entry.pop("crc")  # what is left out changes the line
    if event["type"] == "RolloutFinished":
        if event["purpose"] == "train" and event["step"] in _SHOWN_STEPS:
            shown.add(event["prompt"])
            event["answer"] = copy(event["answer"])
        else:
            event["answer"] = ["", 0, 0, ""]
    return json.dumps(entry, separators=(",", ":"))


def _copied(answers: AnswerFiles, kept: AnswerWriter, place: list[Any]) -> list[Any]:
    """Copy an answer without its log-probs, and return its place in the copy."""
    answer = answers.read(msgspec.convert(place, AnswerRef))
    short = msgspec.structs.replace(answer, logprob_bytes=b"", batches=answer.batches[-1:])
    return msgspec.to_builtins(kept.append(short))


def _write(name: str, lines: list[str]) -> None:
    content = "".join(f"{line}\n" for line in lines).encode()
    (RECORDED / f"{name}.gz").write_bytes(gzip.compress(content, 9, mtime=0))


def _read(name: str) -> bytes:
    return gzip.decompress((RECORDED / f"{name}.gz").read_bytes())


if __name__ == "__main__":
    record(Path(sys.argv[1]))
