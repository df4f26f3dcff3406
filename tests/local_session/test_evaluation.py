"""Held-out sets are evaluated alike within a job, by `tlt eval`, and from a checkpoint."""

import json

import msgspec
import pytest

from tests.local_session.session import LocalSession, changed, write_spec
from tlt.base.id_types import JobId
from tlt.report import Snapshot
from tlt.runs.run_answers import read_answers
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import EvaluationSet

ANSWERS = 4


@pytest.fixture
def spec(spec: JobSpec) -> JobSpec:
    """Return a job with two sets; one has columns of its own, and a prompt that is too long."""
    assert isinstance(spec.data.train, str)
    own = spec.data.train.replace("data.jsonl", "own.jsonl")
    rows = [{"sum": f"{i}+1=", "total": str(i % 2)} for i in (7, 4)]
    rows.insert(1, {"sum": "+".join(["12"] * 300), "total": "0"})
    with open(own, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    sets = {
        "digits": EvaluationSet(path=spec.data.train, answers=ANSWERS, limit=6),
        "own": EvaluationSet(
            path=own,
            answers=ANSWERS,
            prompt_key="sum",
            answer_key="total",
            max_new_tokens=12,
        ),
    }
    return changed(
        msgspec.structs.replace(spec, name="two-sets"),
        policy={"max_context": 256},
        data={"eval": sets, "eval_limit": None},
        algorithm={"eval_every": 2},
    )


async def run_job(session: LocalSession, spec: JobSpec) -> tuple[JobId, Snapshot]:
    await session.all_up()
    job = await session.submit(spec)
    return job, await session.done(job)


def texts(session: LocalSession, job: str, step: int) -> list[str | None]:
    return [row.text for row in read_answers(session.run(JobId(job)), "eval", step)]


async def test_a_job_reports_each_set(session: LocalSession, spec: JobSpec) -> None:
    job, snapshot = await run_job(session, spec)
    before, after = snapshot.evals
    assert [each.name for each in after.sets] == ["digits", "own"]
    digits, own = after.sets
    assert (digits.problems, own.problems, own.skipped) == (6, 2, 1)
    assert (digits.answers, list(digits.pass_at)) == (ANSWERS, [1, 2, ANSWERS])
    assert 12 < digits.length.mean < 48
    assert own.length.mean <= 12
    assert digits.majority is not None
    assert after.mean == pytest.approx((digits.mean + own.mean) / 2)
    assert before.gain is None
    assert after.gain is not None
    assert after.gain.value == pytest.approx(after.mean - before.mean)
    assert f"digits avg@{ANSWERS} {digits.mean:.3f}" in (await session.tlt("logs", job)).stdout
    assert f" {digits.mean:.3f} " in (await session.tlt("ledger", job)).stdout


async def test_the_command_gives_the_answers_of_the_job(
    session: LocalSession, spec: JobSpec
) -> None:
    """The same policy and seed give the same answers, before training and at a checkpoint."""
    job, snapshot = await run_job(session, spec)
    file = write_spec(session, spec)
    for step, evaluated in zip((0, 2), snapshot.evals, strict=True):
        start = ["--from", job] if step else []
        alone = await session.json("eval", file, *start)
        assert [each["mean"] for each in alone["sets"]] == [e.mean for e in evaluated.sets]
        assert texts(session, alone["job"], step) == texts(session, job, step)
        assert alone["version"] == step
    assert texts(session, job, 0) != texts(session, job, 2)


async def test_the_answers_can_be_read_afterwards(session: LocalSession, spec: JobSpec) -> None:
    job, _ = await run_job(session, spec)
    lines = (await session.tlt("samples", job, "--set", "own", "--json")).stdout.splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["right"] for answer in answers] == ["1"] * ANSWERS + ["0"] * ANSWERS
    assert {answer["step"] for answer in answers} == {2}
    assert {answer["stop"] for answer in answers} <= {"length", "stop"}
    shown = (await session.tlt("samples", job, "--eval", "--step", "0", "--limit", "1")).stdout
    assert "=== step 0, prompt 0 of digits, right is 0\n00+01=\n--- answer 0: reward" in shown
    assert "--- answer 3: reward" in shown
    refused = await session.tlt("samples", job, "--set", "x", code=2)
    assert "--set x: " in refused.stderr


async def test_an_evaluation_survives_a_rank_that_dies(
    session: LocalSession, spec: JobSpec
) -> None:
    _, undisturbed = await run_job(session, spec)
    with session.gates.hold("eval-0-answered"):
        job = await session.submit(spec)
        await session.arrived("eval-0-answered", 4)
        await session.kill_rank("w0", 0)
        await session.until(lambda: session.fold(job).losses, "loss")
    found = await session.done(job)
    assert [each.mean for each in found.evals] == [each.mean for each in undisturbed.evals]
    assert [each.sets for each in found.evals] == [each.sets for each in undisturbed.evals]
