"""Estimate what speculation saved: the seconds of a job without it, less those that were spent.

Control runs show what a plain step costs, replays of the finished rollout batches how many there
would have been. Plain steps that the strategy policy chose would have been decoded anyway: they and
their seconds are left out on both sides. What speculation costs beyond its own steps counts as
spent: choosing, keeping states for the drafter, control runs, and slower decoding beside a worker
that trains. All seconds are rank seconds, two in one second of two ranks side by side, and on CPUs
those of CPU time: what other programs take from a rank would hide what speculation saves. Ranks
that share an engine count as one.
"""

import math
from collections.abc import Iterable

import msgspec

from tlt.base.strategies import Off
from tlt.policies.speculation.plain_replay import Replay
from tlt.policies.speculation.plain_step_costs import (
    ControlRunSums,
    ControlSums,
    PlainStepCosts,
    SavingsInterval,
    add_steps,
    fit_plain_step_costs,
    knots_of,
)
from tlt.protocol.shared_values import StrategyTally

# factor of the interval where chosen steps are left out: the others differ from them in contexts
# and batch sizes, so that control runs are no fair sample
_UNFAIR = 1.25
# What control runs can't show: an engine's other costs of being able to speculate, as a share of
# its seconds, 95 %. Engines with and without it differ by .5 to 1 % beyond the estimate
# (benchmarks.foreign).
_UNSEEN = 0.015
# control runs before a loss is believed
_ENOUGH_RUNS = 32


class DecodeCost(msgspec.Struct, frozen=True, array_like=True):
    """Steps, rows, tokens and seconds of one bucket, outside of control runs."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0


class DecodeAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a job's decoding, and the plain steps that it would have taken."""

    # by bucket of batch sizes
    costs: dict[int, DecodeCost] = {}
    # by bucket and whether a worker trained the drafter; without their overhead
    controls: dict[tuple[int, bool], ControlSums] = {}
    # the same of plain steps that were chosen while no worker trained, in replayed batches and in
    # the open one; those of one report count as a run
    chosen: dict[tuple[int, bool], ControlSums] = {}
    newly_chosen: dict[tuple[int, bool], ControlSums] = {}
    # rank seconds of all decoding, control runs included
    seconds: float = 0.0
    control_seconds: float = 0.0
    # of `seconds`: what it costs to be able to speculate
    overhead: float = 0.0
    # plain steps of the replayed batches, and the rank seconds of those that could not be replayed
    plain_steps: dict[int, float] = {}
    unreplayed: float = 0.0
    # of the newest batch, if it could be replayed
    newest: Replay | None = None

    @property
    def runs(self) -> int:
        return sum(sums.runs for sums in self.controls.values())


class BucketCost(msgspec.Struct, frozen=True, kw_only=True):
    """The mean step of a bucket: its seconds and tokens, and a plain step's seconds."""

    bucket: int
    steps: int
    seconds: float
    tokens: float
    plain: float
    runs: int


class Savings(msgspec.Struct, frozen=True, kw_only=True):
    total: SavingsInterval
    # seconds that the replayed batches would have taken without speculation
    plain_seconds: float
    buckets: tuple[BucketCost, ...]
    runs: int
    # seconds of the control runs, and the seconds of them that speculation would have saved
    control_seconds: float
    control_cost: float
    # seconds of being able to speculate; they are counted against the savings
    overhead: float


def add_tallies(
    account: DecodeAccount, tallies: Iterable[StrategyTally], beside_training: bool
) -> DecodeAccount:
    """Add tallies of ranks that decoded while a worker trained the drafter, or while none did."""
    costs, controls, chosen = dict(account.costs), account.controls, account.newly_chosen
    seconds, control_seconds, overhead = account.seconds, account.control_seconds, account.overhead
    for tally in tallies:
        seconds += tally.work
        overhead += tally.overhead
        key = tally.bucket, beside_training
        if tally.control is None:
            costs[tally.bucket] = _add_cost(costs.get(tally.bucket, DecodeCost()), tally)
            if isinstance(tally.strategy, Off) and not beside_training:
                chosen = _add_sums(chosen, {key: _chosen_run(tally)})
            continue
        control_seconds += tally.work
        controls = _add_sums(controls, {key: _control_sums(tally)})
    return msgspec.structs.replace(
        account,
        costs=costs,
        controls=controls,
        newly_chosen=chosen,
        seconds=seconds,
        control_seconds=control_seconds,
        overhead=overhead,
    )


def add_replay(account: DecodeAccount, batch: Replay) -> DecodeAccount:
    steps = add_steps(account.plain_steps, batch.steps)
    chosen = _add_sums(account.chosen, account.newly_chosen)
    return msgspec.structs.replace(
        account, plain_steps=steps, newest=batch, chosen=chosen, newly_chosen={}
    )


def exclude(account: DecodeAccount, seconds: float) -> DecodeAccount:
    """Exclude the seconds of a batch that can't be replayed, because some of it was lost."""
    unreplayed = account.unreplayed + seconds
    return msgspec.structs.replace(account, unreplayed=unreplayed, newest=None, newly_chosen={})


def plain_step_costs(account: DecodeAccount) -> PlainStepCosts | None:
    """Return None until there are runs enough for an interval.

    Chosen steps are no fair sample, so that they only tell where there are no control runs.
    """
    chosen = _add_sums(account.chosen, account.newly_chosen)
    return fit_plain_step_costs(account.controls) or fit_plain_step_costs(
        _add_sums(account.controls, chosen)
    )


def estimate_savings(
    account: DecodeAccount, open_seconds: float, unseen: float = _UNSEEN
) -> Savings | None:
    """Return the savings of all batches but the open one; None without runs enough."""
    plain = plain_step_costs(account)
    if plain is None or not account.plain_steps:
        return None
    spent = account.seconds - account.unreplayed - open_seconds
    steps, chosen_seconds = account.plain_steps, 0.0
    for sums in account.chosen.values():
        chosen_seconds += sums.seconds
        knots = knots_of(sums.rows / sums.steps)
        steps = add_steps(steps, {knot: -sums.steps * share for knot, share in knots.items()})
    total = plain.saving(steps, spent - chosen_seconds)
    half = (_UNFAIR if account.chosen else 1.0) * (total.high - total.seconds)
    half = math.hypot(half, unseen * spent)
    total = SavingsInterval(
        seconds=total.seconds, low=total.seconds - half, high=total.seconds + half
    )
    return Savings(
        total=total,
        plain_seconds=total.seconds + spent,
        buckets=tuple(_bucket_costs(account, plain)),
        runs=account.runs,
        control_seconds=account.control_seconds,
        control_cost=_control_cost(account),
        overhead=account.overhead,
    )


# half-widths of the interval: whoever tests after every batch would otherwise be wrong at some time
_CERTAINTY = 1.7


def estimate_loss(account: DecodeAccount, open_seconds: float) -> SavingsInterval | None:
    """Return the savings of speculation if they are negative beyond doubt.

    What control runs can't show are costs, so they can't make up for a loss.
    """
    if account.runs < _ENOUGH_RUNS:
        return None
    savings = estimate_savings(account, open_seconds, unseen=0.0)
    if savings is None:
        return None
    total = savings.total
    surely_below = total.seconds + _CERTAINTY * (total.high - total.seconds)
    return total if surely_below < 0.0 else None


def _bucket_costs(account: DecodeAccount, plain: PlainStepCosts) -> Iterable[BucketCost]:
    for bucket, cost in sorted(account.costs.items()):
        if cost.steps > 0:
            yield BucketCost(
                bucket=bucket,
                steps=cost.steps,
                seconds=cost.seconds / cost.steps,
                tokens=cost.tokens / cost.rows,
                plain=plain.seconds(cost.rows / cost.steps),
                runs=_all_runs(account.controls, bucket).runs,
            )


def _add_cost(cost: DecodeCost, tally: StrategyTally) -> DecodeCost:
    return DecodeCost(
        cost.steps + tally.steps,
        cost.rows + tally.rows,
        cost.tokens + tally.tokens,
        cost.seconds + tally.work,
    )


def _control_sums(tally: StrategyTally) -> ControlSums:
    assert tally.control is not None
    return ControlSums(
        tally.control.count,
        tally.steps,
        tally.rows,
        tally.work - tally.overhead,
        tally.control.steps_squared,
        tally.control.seconds_squared,
        tally.control.product,
    )


def _add_sums(before: ControlRunSums, more: ControlRunSums) -> dict[tuple[int, bool], ControlSums]:
    after = dict(before)
    for key, sums in more.items():
        after[key] = after.get(key, ControlSums()).plus(sums)
    return after


def _chosen_run(tally: StrategyTally) -> ControlSums:
    seconds = tally.work - tally.overhead
    steps = float(tally.steps)
    return ControlSums(1, steps, tally.rows, seconds, steps**2, seconds**2, steps * seconds)


def _all_runs(controls: ControlRunSums, bucket: int) -> ControlSums:
    both = (controls.get((bucket, beside), ControlSums()) for beside in (False, True))
    return next(both).plus(next(both))


def _control_cost(account: DecodeAccount) -> float:
    """Return the seconds that control runs lost against speculation, where both decoded."""
    lost = 0.0
    for bucket, cost in account.costs.items():
        runs = _all_runs(account.controls, bucket)
        if cost.tokens > 0:
            lost += runs.seconds - runs.rows * cost.seconds / cost.tokens
    return lost
