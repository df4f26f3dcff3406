"""A step's figures, under the names by which loggers like W&B show them.

They are what the ledger knows when the step is over, and the same whenever they are folded again.
"""

import math

import msgspec

from tlt.base.id_types import Step
from tlt.policies.speculation.savings_estimate import SavingsInterval
from tlt.report.acceptance import Acceptance
from tlt.report.duties import sum_by_duty
from tlt.report.evaluation_figures import EvalSummary, SetFigures
from tlt.report.ledger import Ledger
from tlt.report.ledger_figure_types import Snapshot, StepAccount, StepSummary

_Metrics = dict[str, float]


class StepMetrics:
    """Split sums over the run into those of each step."""

    def __init__(self) -> None:
        # rows and tokens by proposer, up to the last step
        self._accepted: dict[str, tuple[int, int]] = {}
        self._micro_batches = 0
        self._total_loss = 0.0

    def of_step(self, ledger: Ledger, step: Step) -> _Metrics:
        """Return the metrics of a step that has just ended; call it once for each step.

        A step whose rollout batch was never closed has only the figures of the whole run.
        """
        snapshot = ledger.snapshot()
        metrics = _whole_run(snapshot)
        summary = snapshot.steps[-1] if snapshot.steps else None
        if summary is not None and summary.step == step:
            metrics |= _answers(summary, ledger.spec.algorithm.prompts_per_step)
            if summary.metrics is not None:
                update = msgspec.structs.asdict(summary.metrics)
                metrics |= {f"update/{k}": v for k, v in update.items() if v is not None}
            account = next(each for each in reversed(snapshot.accounts) if each.step == step)
            metrics |= _seconds(account, summary) | _saved(account)
            metrics |= self._accept_lengths(snapshot.acceptance) | self._drafter(ledger, snapshot)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _accept_lengths(self, acceptance: tuple[Acceptance, ...]) -> _Metrics:
        sums: dict[str, tuple[int, int]] = {}
        for part in acceptance:
            for name in ("all", part.proposer):
                rows, tokens = sums.get(name, (0, 0))
                sums[name] = rows + part.rows, tokens + part.tokens
        metrics: _Metrics = {}
        for name, (rows, tokens) in sums.items():
            rows_before, tokens_before = self._accepted.get(name, (0, 0))
            if rows > rows_before:
                metrics[f"accept_length/{name}"] = (tokens - tokens_before) / (rows - rows_before)
        self._accepted = sums
        return metrics

    def _drafter(self, ledger: Ledger, snapshot: Snapshot) -> _Metrics:
        training = snapshot.drafter_training
        if training is None:
            return {}
        metrics: _Metrics = {
            "drafter/micro_batches": training.micro_batches,
            "drafter/tokens": training.tokens.total,
            "drafter/idle_device_seconds_used": training.idle_used,
            "drafter/idle_device_seconds_left": training.idle_left,
        }
        if training.evaluations:
            metrics["drafter/accept_length"] = training.evaluations[-1].accept_length
        micro_batches, loss = training.micro_batches, ledger.drafter_training.total_loss
        if micro_batches > self._micro_batches:
            new = micro_batches - self._micro_batches
            metrics["drafter/loss"] = (loss - self._total_loss) / new
        self._micro_batches, self._total_loss = micro_batches, loss
        return metrics


def eval_metrics(summary: EvalSummary) -> _Metrics:
    metrics: _Metrics = {
        "eval/reward": summary.mean,
        "eval/stderr": summary.stderr,
        "eval/problems": summary.problems,
        "eval/length": summary.length.mean,
        "eval/seconds": summary.seconds,
        **{f"eval/reward/{name}": mean for name, mean in summary.reward_parts.items()},
    }
    if summary.gain is not None:
        gain = summary.gain
        metrics["eval/gain"] = gain.value
        if gain.low is not None and gain.high is not None:
            metrics |= {"eval/gain_low": gain.low, "eval/gain_high": gain.high}
    for each in summary.sets:
        metrics |= _set_metrics(each)
    return metrics


def _set_metrics(figures: SetFigures) -> _Metrics:
    name = f"eval/{figures.name}"
    metrics: _Metrics = {
        f"{name}/avg@{figures.answers}": figures.mean,
        f"{name}/stderr": figures.stderr,
        f"{name}/length": figures.length.mean,
        f"{name}/truncated": figures.truncated,
        f"{name}/without_reward": figures.unscored,
        **{f"{name}/pass@{k}": share for k, share in figures.pass_at.items()},
    }
    if figures.majority is not None:
        metrics[f"{name}/maj@{figures.answers}"] = figures.majority
    return metrics


def _answers(step: StepSummary, prompts: int) -> _Metrics:
    return {
        "train/reward": step.reward,
        "train/answers": step.rollouts,
        "train/dropped": step.dropped,
        "train/not_scored": step.unscored,
        "train/groups_without_advantage": step.uniform_groups
        / max(1, prompts + step.replaced_groups),
        "train/groups_replaced": step.replaced_groups,
        "train/extra_answers": step.extra_answers,
        "train/extra_share_of_decoding": step.extra_share,
        "train/groups_waiting": step.waiting_groups,
        "train/retractions": step.retractions,
        "train/tokens": step.tokens,
        "length/mean": step.length.mean,
        "length/p50": step.length.p50,
        "length/p90": step.length.p90,
        "length/max": step.length.max,
        "length/truncated": step.truncated,
        **{f"train/reward/{name}": mean for name, mean in step.reward_parts.items()},
        **{f"train/reward_of/{name}": mean for name, mean in step.reward_sources.items()},
    }


def _seconds(account: StepAccount, summary: StepSummary) -> _Metrics:
    metrics: dict[str, float | None] = {
        "seconds/step": account.seconds,
        "seconds/devices": account.device_seconds,
        "seconds/rollout": summary.rollout_seconds,
        "seconds/update": summary.update_seconds,
    }
    if (rollout := account.rollout) is not None:
        slots = sum(rollout.slot_seconds.values())
        metrics |= {
            "tail/seconds_until_50_percent": rollout.done_50,
            "tail/seconds_until_90_percent": rollout.done_90,
            "tail/seconds_until_99_percent": rollout.done_99,
            "tail/empty_slots": sum(rollout.empty_slot_seconds.values()) / slots if slots else 0.0,
        }
    duties = sum_by_duty(account.workers.values())
    if total := sum(duties.values()):
        metrics |= {f"duty/{duty}": seconds / total for duty, seconds in duties.items()}
    return {name: value for name, value in metrics.items() if value is not None}


def _saved(account: StepAccount) -> _Metrics:
    metrics = _interval("savings/seconds", account.savings)
    if account.rollout is not None:
        metrics |= _interval("savings/wait_seconds", account.wait_savings)
    return metrics


def _interval(name: str, saving: SavingsInterval | None) -> _Metrics:
    if saving is None:
        return {}
    return {name: saving.seconds, f"{name}_low": saving.low, f"{name}_high": saving.high}


def _whole_run(snapshot: Snapshot) -> _Metrics:
    metrics: _Metrics = {"run/seconds": snapshot.seconds, "run/worker_losses": snapshot.losses}
    saved = None if snapshot.savings is None else snapshot.savings.total
    return metrics | _interval("savings/seconds_so_far", saved)
