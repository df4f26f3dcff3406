"""What is wrong, the most urgent first, and what to do about it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum

import msgspec

from tlt.dashboard.recent_errors import RecentError
from tlt.dashboard.session_health import Health, WorkerHealth, natural
from tlt.human_format import seconds
from tlt.protocol.records import UpdateMetrics
from tlt.report import Snapshot, StepSummary

_CLIPPED = 0.25
_AGREED = 0.6
_KL = 0.05
_BACKLOG_SECONDS = 5.0
QUIET_SECONDS = 60.0
_MEMORY = 0.9


class Urgency(IntEnum):
    NOW = 0
    SOON = 1
    NOTE = 2


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    urgency: Urgency
    what: str
    do: str


def ordered(advice: Sequence[Advice]) -> tuple[Advice, ...]:
    return tuple(sorted(advice, key=lambda one: one.urgency))


def about_run(
    snapshot: Snapshot,
    prompts: int,
    lately: Sequence[RecentError],
    quiet: float,
    loggers: Mapping[str, str],
) -> Iterator[Advice]:
    """`prompts` of a step; `lately`: what went wrong; `quiet`: seconds since the run's last entry,
    while it should go on; `loggers` that are left alone, and why.
    """
    if snapshot.status == "failed":
        yield Advice(
            urgency=Urgency.NOW,
            what=f"The job failed: {snapshot.error or 'no reason was given'}",
            do="Mend what the error names, and submit it again; its checkpoints are in the folder.",
        )
    if quiet > QUIET_SECONDS:
        yield Advice(
            urgency=Urgency.NOW,
            what="The journal has no end, and nobody has written to it for a minute or longer.",
            do="If no session is at it (`tlt status`), `tlt up` takes the job on where it was.",
        )
    yield from _about_losses([mishap for mishap in lately if mishap.kind == "lost"])
    if snapshot.steps:
        yield from _about_step(snapshot.steps[-1], prompts)
        yield from _about_updates([step.metrics for step in snapshot.steps if step.metrics])
    yield from _about_drafters(lately)
    for logger, why in loggers.items():
        yield Advice(
            urgency=Urgency.NOTE,
            what=f"{logger} is told nothing any more: {why}",
            do="The job goes on without it; logs/loggers.jsonl has the rest. "
            "What it has missed is in the journal all the same.",
        )
    if snapshot.gave_up:
        yield Advice(
            urgency=Urgency.NOTE,
            what="Speculation was given up: beyond doubt it cost more than it saved.",
            do="Nothing. For the next job, a trained drafter (drafter.path) may turn that.",
        )


def _about_losses(losses: Sequence[RecentError]) -> Iterator[Advice]:
    if not losses:
        return
    names = sorted({mishap.worker for mishap in losses}, key=natural)
    named = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    times = "once" if len(losses) == 1 else f"{len(losses)} times"
    yield Advice(
        urgency=Urgency.SOON,
        what=f"Workers were lost {times} in ten minutes ({named}).",
        do="Their logs say why: logs/w*.jsonl in the run's folder. Memory is the usual reason.",
    )


def _about_drafters(lately: Sequence[RecentError]) -> Iterator[Advice]:
    for refused in [mishap for mishap in lately if mishap.kind == "refused"][-2:]:
        yield Advice(
            urgency=Urgency.SOON,
            what=f"A drafter was refused by {refused.worker}: {refused.error}",
            do="Take one that was made for this policy (`tlt drafter train`), or leave "
            "drafter.path out and let idle workers train one.",
        )
    for spoiled in [mishap for mishap in lately if mishap.kind == "spoiled"][-1:]:
        yield Advice(
            urgency=Urgency.SOON,
            what=f"The drafter's training was undone: {spoiled.error}",
            do="It began again from the last good one by itself. If it happens again and again, "
            "say drafter.train: off.",
        )


def _about_step(step: StepSummary, prompts: int) -> Iterator[Advice]:
    if step.unscored:
        yield Advice(
            urgency=Urgency.SOON,
            what=f"{step.unscored} answers of step {step.step} were not scored: "
            "the reward function raised, returned NaN or took too long.",
            do="logs/reward-function.log has what it said; reward.on_error is what they got.",
        )
    if step.dropped:
        yield Advice(
            urgency=Urgency.SOON,
            what=f"{step.dropped} answers of step {step.step} were dropped.",
            do="The log below says why. A prompt that kills its worker is given up in the end.",
        )
    if step.clipped > _CLIPPED:
        yield Advice(
            urgency=Urgency.SOON,
            what=f"{100 * step.clipped:.0f} % of the answers of step {step.step} ran out of room.",
            do="Raise rollout.max_new_tokens, or reward short answers.",
        )
    if prompts and step.agreed / prompts > _AGREED:
        share = 100 * step.agreed / prompts
        yield Advice(
            urgency=Urgency.SOON,
            what=f"{share:.0f} % of the groups of step {step.step} agree: they teach nothing.",
            do="Harder prompts if the reward is high, easier ones if it is low; "
            "or larger groups (algorithm.group_size).",
        )


def _about_updates(updates: Sequence[UpdateMetrics]) -> Iterator[Advice]:
    if not updates:
        return
    last, first = updates[-1], updates[0]
    if not math.isfinite(last.loss) or not math.isfinite(last.gradient_norm):
        yield Advice(
            urgency=Urgency.NOW,
            what="The last update's loss or gradient is no number.",
            do="Cancel, and go on from a checkpoint with a smaller algorithm.learning_rate.",
        )
    if last.sampling_kl > _KL:
        yield Advice(
            urgency=Urgency.SOON,
            what=f"The policy that learns is {last.sampling_kl:.2f} nats a token from the one "
            "that sampled.",
            do="Smaller algorithm.learning_rate, or fewer algorithm.minibatches.",
        )
    if len(updates) > 2 and last.entropy < 0.1 * first.entropy:
        yield Advice(
            urgency=Urgency.NOTE,
            what=f"Entropy fell from {first.entropy:.3f} to {last.entropy:.3f}: "
            "answers hardly differ any more.",
            do="Fine if the accuracy still grows; otherwise raise algorithm.clip_high.",
        )


def about_session(health: Health, up: bool = True) -> Iterator[Advice]:
    if not up:
        yield Advice(
            urgency=Urgency.NOW,
            what="The session is down.",
            do="`tlt up` starts it again; its jobs go on where they were.",
        )
        return
    if health.odd is not None:
        yield Advice(
            urgency=Urgency.NOW,
            what=f"Something in the session's Redis cannot be read: {health.odd}",
            do="It is left out here. An entry of another release is the usual reason: end the "
            "session with the release that began it.",
        )
    if health.error is not None:
        yield Advice(
            urgency=Urgency.NOW,
            what=f"The session's Redis does not answer: {health.error}",
            do="It is started again by itself within seconds; if not, `tlt down` and `tlt up`. "
            "No job is lost.",
        )
        return
    yield from _about_workers(health)
    if health.dead_letters:
        yield Advice(
            urgency=Urgency.NOW,
            what=f"{health.dead_letters} entries are dead letters: nobody could handle them. "
            + "".join(f"The newest, of {one.source}: {one.error}" for one in health.dead[:1]),
            do="The coordinator's log has their errors. Entries of another release are the "
            "usual reason: end the session with the release that began it.",
        )
    for stream in health.streams:
        if stream.oldest_seconds > _BACKLOG_SECONDS and stream.name == "events":
            yield Advice(
                urgency=Urgency.SOON,
                what=f"Events wait for {seconds(stream.oldest_seconds)} until {stream.group} "
                "reads them.",
                do="A reward function that is slow, or a machine that is full: see the load.",
            )
    if health.memory_total and health.memory_used > _MEMORY * health.memory_total:
        yield Advice(
            urgency=Urgency.NOW,
            what=f"{100 * health.memory_used / health.memory_total:.0f} % of the machine's "
            "memory is used.",
            do="Fewer rollout.slots or workers, or a smaller algorithm.microbatch_tokens, "
            "before the kernel ends a rank.",
        )


def _about_workers(health: Health) -> Iterator[Advice]:
    lease = health.lease_seconds
    silent = [worker for worker in health.workers if worker.silent_seconds > lease / 2]
    if silent:
        longest = max(worker.silent_seconds for worker in silent)
        yield Advice(
            urgency=Urgency.NOW,
            what=f"{_named(silent, health.silent)} not heard of for {seconds(longest)}.",
            do=f"After {lease:.0f} s what they hold goes back to the queue and others write it. "
            "They come back by themselves.",
        )
    rankless = [worker for worker in health.workers if not worker.ranks and worker not in silent]
    if rankless:
        yield Advice(
            urgency=Urgency.SOON,
            what=f"{_named(rankless, health.rankless)} without a rank: fresh ones are starting.",
            do="Wait; if that lasts, see logs/ of the session, a file for each worker.",
        )


def _named(some: Sequence[WorkerHealth], count: int) -> str:
    names = ", ".join(worker.worker for worker in some[:3])
    more = max(count, len(some)) - len(some[:3])
    return (
        f"{names} and {more} more are" if more else f"{names} {'is' if len(some) == 1 else 'are'}"
    )
