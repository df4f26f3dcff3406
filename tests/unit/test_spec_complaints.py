"""A spec with an unknown word, or without a file that it names, is refused with what helps."""

from pathlib import Path

import pytest

from tlt.errors import ConfigError
from tlt.spec.spec_files import read_job_spec, require_files

SPEC = """
policy: {path: policy}
data: {train: train.jsonl}
reward: [{kind: numeric}]
algorithm: {steps: 1, prompts_per_step: 2, group_size: 2}
"""


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("policy.dtype=int8", "'int8'; known: auto, float32, bfloat16"),
        (
            "policy.dtype=float23",
            "'float23'; known: auto, float32, bfloat16; did you mean 'float32'?",
        ),
        ("algorithm.compile=x", "'x'; known: true, false, auto"),
        ("algorithm.shards=x", "'x'; known: a number, all"),
        (
            "reward.0.kind=nmeric",
            "'nmeric'; known: final_answer, numeric, math, regex, boxed, code, reasoning_gym, "
            "function, url, model, environment; did you mean 'numeric'?",
        ),
    ],
)
def test_an_unknown_word_is_refused_with_the_known_ones(change: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_job_spec(SPEC, "job.yaml", Path("/"), [change])
    key = change.partition("=")[0].replace(".0", "[0]")
    assert str(error.value) == f"job.yaml: {key}: Invalid enum value {complaint}"


@pytest.mark.parametrize("key", ["algorithm.loss", "algorithm.advantage"])
def test_a_file_of_an_own_function_is_there(tmp_path: Path, key: str) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "train.jsonl").touch()
    spec = read_job_spec(SPEC, "job.yaml", tmp_path, [f"{key}=own.py:f"])
    with pytest.raises(ConfigError, match=f"job.yaml: {key}: {tmp_path}/own.py: no such file"):
        require_files(spec, "job.yaml")
    (tmp_path / "own.py").touch()
    require_files(spec, "job.yaml")
