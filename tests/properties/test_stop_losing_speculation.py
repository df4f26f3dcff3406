"""A job whose speculation neither saves nor costs keeps it, and claims nothing."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tlt.policies.drafter import drafter_event_handling
from tlt.policies.job import stop_losing_speculation
from tlt.policies.speculation import savings_estimate
from tlt.policies.speculation.configured_policy import configured_policy
from tlt.policies.speculation.savings_estimate import DecodeAccount, Savings, estimate_savings
from tlt.policies.speculation.strategy_runs import StrategyRuns
from tlt.policies.speculation.strategy_tallies import TallyCollector
from tlt.strategies import Off

RANKS, ROWS, STEP_SECONDS = 2, 16, 0.001
SEEDS = range(30)


class Ended(NamedTuple):
    savings: Savings | None
    seconds: float
    gave_up: bool


def job(monkeypatch: pytest.MonkeyPatch, seed: int, batches: int, steps: int) -> Ended:
    """Settle batches of so many plain steps a rank, whose control runs come at random."""
    dice, gave_up = random.Random(seed), list[float]()
    ranks: list[tuple[StrategyRuns, TallyCollector]] = []
    for rank in range(RANKS):
        policy = configured_policy(Off(), 0.02)
        policy.set_strategies([Off()])
        draw = random.Random(7 * seed + rank).random
        ranks.append((StrategyRuns(policy, draw), TallyCollector()))
    state = SimpleNamespace(
        decoding=DecodeAccount(),
        speculation_allowed=True,
        workers={"w0": SimpleNamespace(info=SimpleNamespace(ranks=RANKS))},
        spec=SimpleNamespace(rollout=SimpleNamespace(slots=ROWS)),
    )
    turn: Any = SimpleNamespace(state=state, set=lambda **new: vars(state).update(new))
    monkeypatch.setattr(
        stop_losing_speculation, "_give_up", lambda turn, saved, *_: gave_up.append(saved)
    )
    monkeypatch.setattr(drafter_event_handling, "record_speedup", lambda *_: None)
    for _ in range(batches):
        work = 0.0
        for runs, tallies in ranks:
            for _ in range(steps):
                choice = runs.choose(ROWS, 50 * ROWS)
                seconds = STEP_SECONDS * dice.gauss(1.0, 0.05)
                work += seconds
                tallies.add(choice, None, ROWS, ROWS, seconds, seconds, 0.0)
                runs.observe_plain(ROWS, 50 * ROWS, seconds)
            taken = tallies.take(idle=True)
            state.decoding = savings_estimate.add_tallies(state.decoding, taken, False)
        lengths: Sequence[int] = [steps] * (ROWS * RANKS)
        batch: Any = SimpleNamespace(
            requeues=0, dropped=0, lengths=lambda lengths=lengths: lengths, decode_work=work
        )
        stop_losing_speculation.account_for_batch(turn, batch)
    whole = batches * steps * RANKS * STEP_SECONDS
    return Ended(estimate_savings(state.decoding, open_seconds=0.0), whole, bool(gave_up))


@pytest.mark.parametrize(("batches", "steps"), [(60, 30), (60, 60), (40, 150)])
def test_batches_before_the_first_control_run_are_no_loss(
    monkeypatch: pytest.MonkeyPatch, batches: int, steps: int
) -> None:
    jobs = [job(monkeypatch, seed, batches, steps) for seed in SEEDS]
    known = [(ended.savings.total, ended.seconds) for ended in jobs if ended.savings is not None]
    assert len(known) > len(SEEDS) / 2
    bias = sum(total.seconds / seconds for total, seconds in known) / len(known)
    assert abs(bias) < 0.002
    covered = sum(total.low <= 0.0 <= total.high for total, _ in known)
    assert covered >= 0.85 * len(known)
    assert sum(ended.gave_up for ended in jobs) <= 1
