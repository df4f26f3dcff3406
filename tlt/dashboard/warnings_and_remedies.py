"""Warnings: what is wrong, how urgent it is, and what to do about it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum

import msgspec

from tlt.base.human_format import seconds
from tlt.dashboard.recent_errors import RecentError
from tlt.dashboard.session_health import Health, WorkerHealth, natural_order
from tlt.protocol.shared_values import UpdateMetrics
from tlt.report import Snapshot, StepSummary
from tlt.session.fault_log import Fault, describe_fault

_CLIPPED = 0.25
# retractions for each answer
_RETRACTED = 0.25
_AGREED = 0.6
_KL = 0.05
_BACKLOG_SECONDS = 5.0
QUIET_SECONDS = 60.0
_MEMORY = 0.9


class Urgency(IntEnum):
    NOW = 0
    SOON = 1
    NOTE = 2


class Advice(msgspec.Struct, frozen=True):
    urgency: Urgency
    problem: str
    remedy: str


def by_urgency(advice: Iterable[Advice]) -> tuple[Advice, ...]:
    return tuple(sorted(advice, key=lambda one: one.urgency))


def advice_on_run(
    snapshot: Snapshot,
    prompts: int,
    recent: Sequence[RecentError],
    quiet: float,
    loggers: Mapping[str, str],
) -> Iterator[Advice]:
    """Yield advice on a run with `prompts` groups a step.

    `quiet` has the seconds since the last entry of a run that should go on, `loggers` the errors of
    loggers that are not called any more.
    """
    if snapshot.status == "failed":
        yield Advice(
            Urgency.NOW,
            f"The job failed: {snapshot.error or 'no reason was given'}",
            "Fix the cause and submit it again. Its checkpoints are in the run's folder.",
        )
    if quiet > QUIET_SECONDS:
        yield Advice(
            Urgency.NOW,
            "The journal has no end, and nothing was written to it for a minute or longer.",
            "If no session runs this job (`tlt status`), `tlt up` resumes it.",
        )
    yield from _on_losses([error for error in recent if error.kind == "lost"])
    if snapshot.steps:
        yield from _on_step(snapshot.steps[-1], prompts)
        yield from _on_updates([step.metrics for step in snapshot.steps if step.metrics])
    yield from _on_drafters(recent)
    for logger, why in loggers.items():
        yield Advice(
            Urgency.NOTE,
            f"The logger {logger} has failed and is not called any more: {why}",
            "The job goes on without it. Details are in logs/loggers.jsonl; "
            "the journal has the figures that it missed.",
        )
    if snapshot.gave_up:
        yield Advice(
            Urgency.NOTE,
            "Speculation is paused: it measurably cost more time than it saved.",
            "Nothing: it is tried again later. In the next job, a trained drafter may help.",
        )


def _on_losses(losses: Sequence[RecentError]) -> Iterator[Advice]:
    if not losses:
        return
    names = sorted({error.worker for error in losses}, key=natural_order)
    listed = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    times = "once" if len(losses) == 1 else f"{len(losses)} times"
    yield Advice(
        Urgency.SOON,
        f"Workers were lost {times} in ten minutes ({listed}).",
        "Their logs say why: logs/w*.jsonl in the run's folder. The usual reason is memory.",
    )


def _on_drafters(recent: Sequence[RecentError]) -> Iterator[Advice]:
    for error in [error for error in recent if error.kind == "refused"][-2:]:
        yield Advice(
            Urgency.SOON,
            f"{error.worker} refused a drafter: {error.error}",
            "Use one that was made for this policy (`tlt drafter train`), or leave "
            "drafter.path out and let idle workers train one.",
        )
    for error in [error for error in recent if error.kind == "diverged"][-1:]:
        yield Advice(
            Urgency.SOON,
            f"Drafter training diverged and was undone: {error.error}",
            "It restarted from the last good drafter. If this happens repeatedly, "
            "set drafter.train: off.",
        )


def _on_step(step: StepSummary, prompts: int) -> Iterator[Advice]:
    if step.unscored:
        yield Advice(
            Urgency.SOON,
            f"{step.unscored} answers of step {step.step} were not scored: "
            "the reward function raised, returned NaN or took too long.",
            "Its output is in logs/reward-function.log; these answers got reward.on_error.",
        )
    if step.dropped:
        yield Advice(
            Urgency.SOON,
            f"{step.dropped} answers of step {step.step} were dropped.",
            "The log below says why. A prompt that repeatedly kills its worker is dropped.",
        )
    if step.truncated > _CLIPPED:
        yield Advice(
            Urgency.SOON,
            f"{100 * step.truncated:.0f} % of the answers of step {step.step} hit the token limit.",
            "Raise rollout.max_new_tokens, or reward short answers.",
        )
    if step.retractions > _RETRACTED * step.rollouts:
        yield Advice(
            Urgency.SOON,
            f"SGLang retracted answers {step.retractions} times in step {step.step} for lack of "
            "memory, and read their tokens again.",
            "Set fewer rollout.slots, a smaller policy.max_context, or more rollout.cache_tokens.",
        )
    groups = prompts + step.replaced_groups
    if groups and step.uniform_groups / groups > _AGREED:
        share = 100 * step.uniform_groups / groups
        yield Advice(
            Urgency.SOON,
            f"{share:.0f} % of the groups of step {step.step} have equal rewards "
            "and teach the policy nothing.",
            "Use harder prompts if the reward is high, easier ones if it is low, "
            "or larger groups (algorithm.group_size); algorithm.dynamic_sampling replaces them.",
        )


def _on_updates(updates: Sequence[UpdateMetrics]) -> Iterator[Advice]:
    if not updates:
        return
    last, first = updates[-1], updates[0]
    if last.skipped_steps:
        steps = last.optimiser_steps + last.skipped_steps
        yield Advice(
            Urgency.NOW,
            f"{last.skipped_steps} of {steps} optimiser steps of the last update were skipped: "
            "their gradients were not finite.",
            "Cancel, and continue from a checkpoint with a smaller algorithm.learning_rate.",
        )
    if last.sampling_kl > _KL:
        yield Advice(
            Urgency.SOON,
            f"The updated policy is {last.sampling_kl:.2f} nats a token away from the one "
            "that sampled.",
            "Use a smaller algorithm.learning_rate, or fewer algorithm.minibatches.",
        )
    if len(updates) > 2 and last.entropy < 0.1 * first.entropy:
        yield Advice(
            Urgency.NOTE,
            f"Entropy fell from {first.entropy:.3f} to {last.entropy:.3f}: "
            "answers hardly differ any more.",
            "This is fine while accuracy grows; otherwise raise algorithm.clip_high.",
        )


def advice_on_session(
    health: Health, up: bool = True, faults: Sequence[Fault] = (), now: float = 0.0
) -> Iterator[Advice]:
    """Yield advice on a session; `faults` are recent ones."""
    if not up:
        yield Advice(
            Urgency.NOW,
            "The session is down.",
            "`tlt up` starts it again; its jobs resume where they were.",
        )
        return
    yield from _on_faults(faults, now)
    if health.unreadable is not None:
        yield Advice(
            Urgency.NOW,
            f"Something in the session's Redis cannot be read: {health.unreadable}",
            "It is left out here. The usual reason is an entry of another release: end the "
            "session with the release that began it.",
        )
    if health.error is not None:
        yield Advice(
            Urgency.NOW,
            f"The session's Redis does not answer: {health.error}",
            "The session restarts it within seconds; if not, `tlt down` and `tlt up`. "
            "No job is lost.",
        )
        return
    for wait in health.waits:
        yield Advice(Urgency.NOW, f"{wait}.", "Nothing is lost: all goes on once there is room.")
    yield from _on_workers(health)
    if health.dead_letters:
        newest = health.newest_dead_letters[:1]
        yield Advice(
            Urgency.NOW,
            f"{health.dead_letters} entries are dead letters: they could not be handled. "
            + "".join(f"The newest, of {one.source}: {one.error}" for one in newest),
            "The coordinator's log has their errors. The usual reason is entries of another "
            "release: end the session with the release that began it.",
        )
    for stream in health.streams:
        if stream.oldest_seconds > _BACKLOG_SECONDS and stream.name == "events":
            yield Advice(
                Urgency.SOON,
                f"Events have waited {seconds(stream.oldest_seconds)} for {stream.group}.",
                "The reward function is slow, or the machine is overloaded: see its load.",
            )
    if health.memory_total and health.memory_used > _MEMORY * health.memory_total:
        yield Advice(
            Urgency.NOW,
            f"{100 * health.memory_used / health.memory_total:.0f} % of the machine's "
            "memory is used.",
            "Use fewer rollout.slots or workers, or a smaller algorithm.microbatch_tokens, "
            "before the kernel kills a rank.",
        )


def _on_faults(faults: Sequence[Fault], now: float) -> Iterator[Advice]:
    healed = [fault for fault in faults if fault.healed_at is not None]
    for fault in faults:
        if fault.healed_at is None:
            yield Advice(
                Urgency.NOW,
                f"{describe_fault(fault, now)}.",
                "Wait: the job goes on from its journal. If it lasts, see `tlt status` and "
                "logs/supervisor.jsonl of the session.",
            )
    if healed:
        before = f" {len(healed)} such faults in ten minutes." if len(healed) > 1 else ""
        yield Advice(
            Urgency.SOON,
            f"{describe_fault(healed[-1], now)}.{before}",
            "No job is lost. If it happens again, look for its cause: mostly the kernel, which "
            "kills processes when memory runs out (`dmesg`); logs/ray-ended has Ray's own logs.",
        )


def _on_workers(health: Health) -> Iterator[Advice]:
    lease = health.lease_seconds
    silent = [worker for worker in health.workers if worker.silent_seconds > lease / 2]
    if silent:
        longest = max(worker.silent_seconds for worker in silent)
        verb, names = _verb_and_names(silent, health.silent)
        yield Advice(
            Urgency.NOW,
            f"{names} {verb} sent no heartbeat for {seconds(longest)}.",
            f"After {lease:.0f} s their prompts go back to the queue and other workers take them. "
            "Lost workers come back by themselves.",
        )
    rankless = [worker for worker in health.workers if not worker.ranks and worker not in silent]
    if rankless:
        verb, names = _verb_and_names(rankless, health.rankless)
        yield Advice(
            Urgency.SOON,
            f"{names} {verb} no rank: new ranks are starting.",
            "Wait; if it lasts, see logs/ of the session, which has a file for each worker.",
        )


def _verb_and_names(listed: Sequence[WorkerHealth], count: int) -> tuple[str, str]:
    names = ", ".join(worker.worker for worker in listed[:3])
    more = max(count, len(listed)) - len(listed[:3])
    return (
        "has" if len(listed) == 1 and not more else "have",
        f"{names} and {more} more" if more else names,
    )
