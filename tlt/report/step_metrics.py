"""A step's figures under the names that other people's walls of screens show them by.

They are what the ledger knows when the step is over, and the same whenever they are folded again.
"""

import math
from collections.abc import Mapping

from tlt.ids import Step, WorkerId
from tlt.policies.job.run_state import RunState
from tlt.policies.speculation.savings_estimate import SavingsInterval
from tlt.protocol.events import AnyEvent, DrafterDeltaReady
from tlt.protocol.records import Joules, UpdateMetrics
from tlt.report.ledger import Ledger
from tlt.report.run_summary import (
    Acceptance,
    EvalSummary,
    Rollout,
    Snapshot,
    StepAccount,
    StepSummary,
)

_Figures = dict[str, float]


class Figures:
    """What lies between two steps: sums over the run have to be told apart by step."""

    def __init__(self) -> None:
        # rows and tokens by who drafted, up to the last step that was told
        self._accepted: dict[str, tuple[int, int]] = {}
        self._updates = 0
        self._loss = 0.0

    def watch(self, before: RunState, event: AnyEvent, after: RunState) -> None:
        if isinstance(event, DrafterDeltaReady) and after.drafter is not before.drafter:
            self._updates += event.updates
            self._loss += event.updates * event.loss

    def of_step(self, ledger: Ledger, step: Step) -> _Figures:
        """Once, when it is over; a round that was never closed has but what the run has."""
        snapshot = ledger.snapshot()
        found = _whole_run(snapshot)
        summary = snapshot.steps[-1] if snapshot.steps else None
        if summary is not None and summary.step == step:
            found |= _answers(summary, ledger.spec.algorithm.prompts_per_step)
            if summary.metrics is not None:
                found |= _update(summary.metrics)
            account = next(each for each in reversed(snapshot.accounts) if each.step == step)
            found |= _seconds(account, summary) | _saved(account)
            found |= self._accept_lengths(snapshot.acceptance) | self._drafter(snapshot)
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _accept_lengths(self, acceptance: tuple[Acceptance, ...]) -> _Figures:
        sums: dict[str, tuple[int, int]] = {}
        for part in acceptance:
            for name in ("all", part.by):
                rows, tokens = sums.get(name, (0, 0))
                sums[name] = rows + part.rows, tokens + part.tokens
        found: _Figures = {}
        for name, (rows, tokens) in sums.items():
            rows_before, tokens_before = self._accepted.get(name, (0, 0))
            if rows > rows_before:
                found[f"accept_length/{name}"] = (tokens - tokens_before) / (rows - rows_before)
        self._accepted = sums
        return found

    def _drafter(self, snapshot: Snapshot) -> _Figures:
        found: _Figures = {}
        if self._updates:
            found["drafter/loss"] = self._loss / self._updates
        self._updates, self._loss = 0, 0.0
        drafting = snapshot.drafting
        if drafting is None:
            return found
        if drafting.measured:
            found["drafter/canary"] = drafting.measured[-1].trained
        return found | {
            "drafter/micro_batches": drafting.micro_batches,
            "drafter/tokens": drafting.tokens.total,
            "drafter/idle_device_seconds_used": drafting.idle_used,
            "drafter/idle_device_seconds_left": drafting.idle_left,
            "drafter/bought_device_seconds": drafting.bought,
        }


def of_eval(done: EvalSummary) -> _Figures:
    return {
        "eval/reward": done.mean,
        "eval/stderr": done.stderr,
        "eval/problems": done.problems,
        "eval/length": done.length.mean,
        "eval/seconds": done.seconds,
    }


def _answers(step: StepSummary, prompts: int) -> _Figures:
    return {
        "train/reward": step.reward,
        "train/answers": step.rollouts,
        "train/dropped": step.dropped,
        "train/not_scored": step.unscored,
        "train/groups_without_advantage": step.agreed / max(1, prompts),
        "train/tokens": step.tokens,
        "length/mean": step.length.mean,
        "length/p50": step.length.p50,
        "length/p90": step.length.p90,
        "length/max": step.length.max,
        "length/ran_out_of_room": step.clipped,
    }


def _update(metrics: UpdateMetrics) -> _Figures:
    found = {
        "update/loss": metrics.loss,
        "update/gradient_norm": metrics.gradient_norm,
        "update/learning_rate": metrics.learning_rate,
        "update/entropy": metrics.entropy,
        "update/clipped_low": metrics.clipped_low,
        "update/clipped_high": metrics.clipped_high,
        "update/sampling_kl": metrics.sampling_kl,
        "update/importance_truncated": metrics.importance_truncated,
        "update/tokens": metrics.tokens,
        "update/samples": metrics.samples,
    }
    if metrics.reference_kl is not None:
        found["update/reference_kl"] = metrics.reference_kl
    return found


def _seconds(account: StepAccount, summary: StepSummary) -> _Figures:
    found: _Figures = {
        "seconds/step": account.seconds,
        "seconds/devices": account.device_seconds,
        "seconds/rollout": summary.rollout_seconds,
    }
    if summary.learn_seconds is not None:
        found["seconds/update"] = summary.learn_seconds
    if account.rollout is not None:
        found |= _rollout(account.rollout)
    return found | _joules(account.joules) | _duties(account.workers)


def _joules(spent: Joules | None) -> _Figures:
    if spent is None:
        return {}
    both = {"joules/processors": spent.host, "joules/gpus": spent.devices}
    return {name: joules for name, joules in both.items() if joules is not None}


def _rollout(rollout: Rollout) -> _Figures:
    slots = sum(rollout.slots.values())
    return {
        "tail/seconds_until_50_percent": rollout.done_50,
        "tail/seconds_until_90_percent": rollout.done_90,
        "tail/seconds_until_99_percent": rollout.done_99,
        "tail/empty_slots": sum(rollout.empty.values()) / slots if slots else 0.0,
    }


def _duties(workers: Mapping[WorkerId, Mapping[str, float]]) -> _Figures:
    """Of all workers' seconds, the share of each duty."""
    sums: _Figures = {}
    for spent in workers.values():
        for duty, seconds in spent.items():
            sums[duty] = sums.get(duty, 0.0) + seconds
    total = sum(sums.values())
    return {f"duty/{duty}": seconds / total for duty, seconds in sums.items()} if total else {}


def _saved(account: StepAccount) -> _Figures:
    found: _Figures = {}
    if account.saved is not None:
        found |= _saving("saved/seconds", account.saved)
    if account.critical is not None and account.rollout is not None:
        found |= _saving("saved/seconds_of_the_wait", account.critical)
    return found


def _saving(name: str, saving: SavingsInterval) -> _Figures:
    found = {name: saving.seconds}
    if saving.low is not None and saving.high is not None:
        found |= {f"{name}_low": saving.low, f"{name}_high": saving.high}
    return found


def _whole_run(snapshot: Snapshot) -> _Figures:
    found: _Figures = {"run/seconds": snapshot.seconds, "run/worker_losses": snapshot.losses}
    if snapshot.saved is not None:
        found |= _saving("saved/seconds_so_far", snapshot.saved.total)
    return found
