"""A program gets the same run as the command line, and its functions score in the session."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import tlt
from examples.python_api import brief_sums
from tests.e2e.live import Live
from tlt.errors import ConfigError, NoSession

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
STEPS = 2


@pytest.fixture
def session(live: Live, monkeypatch: pytest.MonkeyPatch) -> tlt.OpenSession:
    monkeypatch.setenv("TLT_HOME", live.environment["TLT_HOME"])
    return tlt.connect()


def test_the_example_gets_the_rewards_of_the_command_line(
    session: tlt.OpenSession, live: Live, tmp_path: Path
) -> None:
    run = brief_sums.train(session, STEPS)
    assert run.status == "done"
    raw = yaml.safe_load(live.tlt("config", "show", str(spec_of(run, tmp_path))).stdout)
    file = tmp_path / "same.yaml"
    file.write_text(yaml.safe_dump(raw))
    job = live.submit(file)
    assert live.await_end(job)["status"] == "done"
    ours, theirs = run.snapshot(), live.fold(job)
    assert [step.reward for step in ours.steps] == [step.reward for step in theirs.steps]
    assert [done.mean for done in run.evaluations] == [done.mean for done in theirs.evals]
    assert len(ours.steps) == STEPS
    assert any(step.reward > 0 for step in ours.steps)


def spec_of(run: tlt.Run, folder: Path) -> Path:
    file = folder / "spec.yaml"
    file.write_bytes((run.folder / "spec.json").read_bytes())
    return file


def small(spec: Path, **changes: Any) -> tlt.Job:
    return tlt.Job(spec, algorithm={"steps": 1, "eval_every": 0}, **changes)


def test_functions_without_a_file_and_several_rewards(
    session: tlt.OpenSession, spec: Path, tmp_path: Path
) -> None:
    bonus = 0.25

    @tlt.reward(weight=2.0)
    def constant(completion: str, answer: Any, row: Any) -> float:
        return bonus

    run = session.run(small(spec, reward=[constant, {"kind": "numeric"}]))
    (step,) = run.snapshot().steps
    assert step.reward_parts["constant"] == bonus
    assert step.reward == pytest.approx(2 * bonus + step.reward_parts["numeric"])
    longer = tlt.Job(spec, algorithm={"steps": 2, "eval_every": 0})
    (next_step,) = session.run(longer, from_job=run).snapshot().steps
    assert next_step.step == 1
    with pytest.raises(ConfigError, match="has no checkpoint of step 5"):
        session.submit(longer, from_job=run.name, step=5)
    exported = run.export(tmp_path / "policy")
    assert (exported / "model.safetensors").is_file()
    assert run.name in [each.name for each in session.jobs()]


async def test_waits_where_a_loop_runs_and_tells_failures(
    session: tlt.OpenSession, spec: Path
) -> None:
    def broken(completion: str, answer: Any, row: Any) -> float:
        raise KeyError("x")

    run = session.submit(small(spec, reward=broken))
    with pytest.raises(tlt.JobFailed, match="no answer of step 0 could be scored"):
        run.result()
    assert run.status == "failed"


def test_names_what_is_wrong(session: tlt.OpenSession, spec: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        session.submit(tlt.Job(spec, algorithm={"stepz": 1}))
    with pytest.raises(ConfigError, match="a row isn't JSON"):
        session.submit(tlt.Job(spec, data={"train": [{"prompt": object()}]}))
    with pytest.raises(ConfigError, match="there is no job 'nothing'"):
        session.job("nothing")
    with pytest.raises(NoSession):
        tlt.connect("nothing")


def test_evaluates_rows_in_several_sets(session: tlt.OpenSession, spec: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]
    sets = {"three": {"path": rows, "answers": 2}, "one": {"path": rows[:1]}}
    run = session.evaluate(tlt.Job(spec, data={"eval": sets}))
    (evaluation,) = run.evaluations
    assert [(each.name, each.problems, each.answers) for each in evaluation.sets] == [
        ("three", 3, 2),
        ("one", 1, 1),
    ]
    answers = run.answers(only="one")
    assert [(answer.question, answer.right, answer.tokens) for answer in answers] == [
        ("0+1=", "1", 24)
    ]
    with pytest.raises(ConfigError, match=r"data.eval.x: a set is a mapping with a path"):
        session.evaluate(tlt.Job(spec, data={"eval": {"x": rows}}))
