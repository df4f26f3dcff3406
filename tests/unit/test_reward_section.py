"""A function of a program can be loaded by a process that has nothing of the program."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tlt
from tlt.api.job_description import Job
from tlt.api.reward_functions import reward_section
from tlt.errors import ConfigError

PROGRAM = """
import sys
from pathlib import Path
import tlt
import beside
from package.inner import twice

@tlt.reward(weight=0.5)
def of_the_program(completion, answer, row):
    return beside.one() + FACTOR

FACTOR = 10
from tlt.api.reward_functions import reward_section
for function in (of_the_program, twice):
    section = reward_section(function, Path(sys.argv[1]))
    print(section["function"], section.get("weight", 1))
"""
LOADS = """
import sys
from tlt.rewards.kinds.reward_functions import load_function
for dotted in sys.argv[1:]:
    print(load_function(dotted).call(completion="abc", answer=None, row={}))
"""


def python(*arguments: str, cwd: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_functions_bring_their_programs_path(tmp_path: Path) -> None:
    program, elsewhere = tmp_path / "program", tmp_path / "elsewhere"
    for folder in (program / "package", elsewhere):
        folder.mkdir(parents=True)
    (program / "main.py").write_text(PROGRAM)
    (program / "beside.py").write_text("def one():\n    return 1\n")
    (program / "package" / "__init__.py").touch()
    (program / "package" / "other.py").write_text("TWO = 2\n")
    (program / "package" / "inner.py").write_text(
        "from .other import TWO\ndef twice(completion, answer, row):\n"
        "    return TWO * len(completion)\n"
    )
    first, weight, second, plain = python("main.py", str(elsewhere), cwd=program)
    assert (weight, plain) == ("0.5", "1")
    assert python("-c", LOADS, first, second, cwd=elsewhere) == ["11", "6"]


def constant(completion: str, answer: Any, row: Any) -> float:
    return 0.5


def test_wrapped_functions_keep_their_wrapper(tmp_path: Path) -> None:
    @functools.wraps(constant)
    def doubled(*arguments: Any, **named: Any) -> float:
        return 2 * constant(*arguments, **named)

    section = reward_section(doubled, tmp_path)
    assert python("-c", LOADS, section["function"], cwd=tmp_path) == ["1.0"]


def test_sources_of_a_mixture_may_be_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "path": "a column"}]
    sources = [{"path": rows, "name": "sums", "weight": 2}, {"path": str(tmp_path)}]
    section = {"steps": 1, "prompts_per_step": 1, "group_size": 2}
    for train, count in ((sources, 2), (rows, 1)):
        job = Job(policy=str(tmp_path), data={"train": train}, reward=constant, algorithm=section)
        spec = job.to_spec(tmp_path)
        assert len(spec.data.sources) == count
        assert (
            Path(spec.data.sources[0].path).read_text() == '{"prompt":"1+1=","path":"a column"}\n'
        )


def test_a_source_with_an_unknown_key_is_none_of_rows(tmp_path: Path) -> None:
    sources = [{"path": "a", "weigth": 2}, {"path": "b"}]
    job = Job(policy="x", data={"train": sources}, reward=constant)
    with pytest.raises(ConfigError, match="weigth"):
        job.to_spec(tmp_path)


def test_a_null_of_the_data_is_kept(tmp_path: Path) -> None:
    section = {"steps": 1, "prompts_per_step": 1, "group_size": 2}
    data = {"train": [{"prompt": "1+1="}], "answer_key": None}
    job = Job(policy=str(tmp_path), data=data, reward=constant, algorithm=section)
    assert job.to_spec(tmp_path).data.answer_key is None


@pytest.mark.parametrize("reward", ["math", 5])
def test_what_is_no_reward_is_named(tmp_path: Path, reward: Any) -> None:
    job = Job(policy="x", data={"train": []}, reward=reward)
    with pytest.raises(ConfigError, match="neither a function nor a section"):
        job.to_spec(tmp_path)


def test_the_package_lists_what_it_offers() -> None:
    assert set(tlt.__all__) <= set(dir(tlt))
    with pytest.raises(AttributeError):
        getattr(tlt, "nothing")  # noqa: B009
