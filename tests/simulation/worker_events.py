"""Make answers, tallies and rewards of simulated workers as pure functions of their inputs."""

from typing import Any

from tests.simulation.incarnation import WorkerIncarnation
from tlt.base.id_types import NAMED, Digest, JobId
from tlt.base.strategies import Draft, Off
from tlt.policies.keyed_random import mix
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import RolloutCut, RolloutFinished
from tlt.protocol.refs import AnswerRef, DrafterRef
from tlt.protocol.shared_values import ControlRuns, StrategyTally
from tlt.spec.config import JobSpec

JOB = JobId("job")


def answer(incarnation: WorkerIncarnation, prompt: PromptIssued) -> RolloutFinished:
    length = 4000 * (1 + mix(prompt.step, prompt.prompt, prompt.member) % 5)
    key = prompt.step, prompt.purpose, prompt.prompt, prompt.member, prompt.attempt
    digest = Digest("-".join(map(str, key)))
    return RolloutFinished(
        job=JOB,
        epoch=prompt.epoch,
        step=prompt.step,
        attempt=prompt.attempt,
        worker=incarnation.worker,
        incarnation=incarnation.number,
        purpose=prompt.purpose,
        prompt=prompt.prompt,
        member=prompt.member,
        answer=AnswerRef(file=f"{incarnation.number}.0", offset=0, bytes=1, digest=digest),
        length=length,
        accepted=(),
        batch=1,
        decode_seconds=1.0,
        stop="stop",
        prompt_length=5 + prompt.prompt,
    )


def cut(incarnation: WorkerIncarnation, prompt: PromptIssued) -> RolloutCut:
    """Return a cut after some tokens, or before the first."""
    finished = answer(incarnation, prompt)
    kept = mix(prompt.prompt, prompt.member, prompt.attempt) % 3 > 0
    return RolloutCut(
        job=JOB,
        epoch=prompt.epoch,
        step=prompt.step,
        attempt=prompt.attempt,
        worker=incarnation.worker,
        incarnation=incarnation.number,
        purpose=prompt.purpose,
        prompt=prompt.prompt,
        member=prompt.member,
        answer=finished.answer if kept else prompt.prefix,
        decode_seconds=0.5,
        excused=prompt.excused,
    )


def tallies(
    speedup: float, number: int, drafter: DrafterRef | None, tokens: int
) -> tuple[StrategyTally, ...]:
    """Tally control runs at 32 tokens a second, and `tokens` with speculation at another speed.

    One drafter in four does worse in rollouts than in its evaluation.
    """
    version = NAMED if drafter is None else drafter.version
    length = 1 if version % 4 == 3 else 2
    bucket = 1 << number % 3
    runs = [bucket * (1.0 + 0.1 * (-1) ** (number + i)) for i in range(3)]
    common: dict[str, Any] = {"bucket": bucket, "explored": 0, "overhead": 0.0, "expected": 0.0}
    control = ControlRuns(
        count=len(runs),
        steps_squared=len(runs) * 32.0**2,
        seconds_squared=sum(seconds**2 for seconds in runs),
        product=32.0 * sum(runs),
    )
    return (
        StrategyTally(
            strategy=Draft(depth=2),
            drafter=version,
            control=None,
            steps=tokens // (length * bucket),
            rows=tokens // length,
            tokens=tokens,
            seconds=tokens / (32.0 * speedup),
            work=tokens / (32.0 * speedup),
            **common,
        ),
        StrategyTally(
            strategy=Off(),
            drafter=None,
            control=control,
            steps=32 * len(runs),
            rows=32 * len(runs) * bucket,
            tokens=32 * len(runs) * bucket,
            seconds=sum(runs),
            work=sum(runs),
            **common,
        ),
    )


def reward(spec: JobSpec, done: RolloutFinished) -> float:
    """Return 0 or 1; it depends on the attempt, so that a score of the wrong answer is noticed."""
    return float(_draw(spec, done) % 2)


def reward_or_none(spec: JobSpec, done: RolloutFinished) -> float | None:
    """Return now and then None for an answer that is left out."""
    return None if _draw(spec, done) % 16 == 15 else reward(spec, done)


def _draw(spec: JobSpec, done: RolloutFinished) -> int:
    return mix(spec.seed, done.step, done.prompt, done.member, done.attempt)
