"""A spec that can be prepared."""

from pathlib import Path

import msgspec
import pytest

from examples.tiny_reasoner import task
from tests.samples import SPEC
from tlt.spec.config import JobSpec, PolicySpec

MODEL = Path(task.__file__).parent / "model"


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    for name, terms in (("train", 3), ("eval", 5)):
        problems = [(12, 34)] * terms
        task.write_rows(problems, tmp_path / f"{name}.jsonl")
    (tmp_path / "noisy.py").write_text(
        'print(\'{"error": "printed"}\')\ndef reward(**_):\n    return 1\n'
    )
    replace = msgspec.structs.replace
    return replace(
        SPEC,
        policy=PolicySpec(path=str(MODEL)),
        data=replace(
            SPEC.data,
            train=str(tmp_path / "train.jsonl"),
            eval=str(tmp_path / "eval.jsonl"),
            eval_limit=2,
        ),
        reward=replace(SPEC.reward, kind="function", function=f"{tmp_path / 'noisy.py'}:reward"),
    )
