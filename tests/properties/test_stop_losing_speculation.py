"""Speculation is given up where it loses time, tried again, and kept where it neither gains."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tlt.base.strategies import Ngram, Off
from tlt.policies.run import drafter_training_scheduler, stop_losing_speculation
from tlt.policies.run.run_state import Duty, Membership, SpeculationAttempt
from tlt.policies.speculation import savings_estimate
from tlt.policies.speculation.configured_policy import configured_policy
from tlt.policies.speculation.savings_estimate import DecodeAccount, estimate_savings
from tlt.policies.speculation.strategy_runs import StrategyRuns
from tlt.policies.speculation.strategy_tallies import TallyCollector
from tlt.protocol.commands import GiveUpSpeculation
from tlt.spec.config import RolloutSpec

RANKS, ROWS, STEP_SECONDS = 2, 16, 0.001
SEEDS = range(30)
_STRATEGY = Ngram(tokens=2)


@pytest.fixture(autouse=True)
def _no_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_training_scheduler, "stop_all", lambda *_: None)


class State(SimpleNamespace):
    @property
    def speculation_allowed(self) -> bool:
        return self.attempt.allowed


class Job:
    """Decodes batches; some of the steps are control runs, at random."""

    def __init__(self, seed: int) -> None:
        self.state = State(
            job="job",
            decoding=DecodeAccount(),
            attempt=SpeculationAttempt(),
            membership=Membership(engines={Duty.ROLLOUT: RANKS}),
            spec=SimpleNamespace(
                rollout=RolloutSpec(slots=ROWS), algorithm=SimpleNamespace(staleness=0)
            ),
        )
        self.commands: list[Any] = []
        self._dice = random.Random(seed)
        self._ranks: list[tuple[StrategyRuns, TallyCollector]] = []
        for rank in range(RANKS):
            policy = configured_policy(_STRATEGY, 0.02)
            policy.set_strategies([_STRATEGY, Off()])
            draw = random.Random(7 * seed + rank).random
            self._ranks.append((StrategyRuns(policy, draw), TallyCollector()))
        self._turn: Any = SimpleNamespace(
            state=self.state, set=self._set, emit=self.commands.append
        )

    @property
    def gave_up(self) -> bool:
        return any(isinstance(command, GiveUpSpeculation) for command in self.commands)

    def decode_batch(self, steps: int, cost: float = 1.0) -> None:
        """Decode so many steps a rank; a step that isn't a control run costs `cost` times as much.

        Its rows gain one token, as those of a plain step.
        """
        work = 0.0
        for runs, tallies in self._ranks if self.state.attempt.allowed else ():
            for _ in range(steps):
                choice = runs.choose(ROWS, 50 * ROWS)
                seconds = STEP_SECONDS * self._dice.gauss(1.0, 0.05)
                seconds *= 1.0 if choice.why == "control" else cost
                work += seconds
                tallies.add(choice, None, ROWS, ROWS, seconds, seconds, 0.0)
                runs.observe_plain(ROWS, 50 * ROWS, seconds)
            taken = tallies.take(idle=True)
            for name in ("decoding", "attempt"):
                self._add(name, taken)
        batch: Any = SimpleNamespace(
            wanted=None,
            requeues=0,
            dropped=0,
            extra=0,
            lengths=lambda: [steps] * (ROWS * RANKS),
            decode_work=work,
        )
        stop_losing_speculation.account_for_batch(self._turn, batch)

    def _add(self, name: str, tallies: Any) -> None:
        if name == "decoding":
            added = savings_estimate.add_tallies(self.state.decoding, tallies, False)
            self._set(decoding=added)
        else:
            added = savings_estimate.add_tallies(self.state.attempt.decoding, tallies, False)
            self._set(attempt=msgspec.structs.replace(self.state.attempt, decoding=added))

    def _set(self, **changes: object) -> None:
        vars(self.state).update(changes)


@pytest.mark.parametrize(("batches", "steps"), [(60, 30), (60, 60), (40, 150)])
def test_batches_before_the_first_control_run_are_no_loss(batches: int, steps: int) -> None:
    jobs = [Job(seed) for seed in SEEDS]
    for job in jobs:
        for _ in range(batches):
            job.decode_batch(steps)
    estimates = [estimate_savings(job.state.decoding, open_seconds=0.0) for job in jobs]
    known = [savings.total for savings in estimates if savings is not None]
    assert len(known) > len(SEEDS) / 2
    whole = batches * steps * RANKS * STEP_SECONDS
    assert abs(sum(total.seconds for total in known) / whole / len(known)) < 0.002
    covered = sum(total.low <= 0.0 <= total.high for total in known)
    assert covered >= 0.85 * len(known)
    assert sum(job.gave_up for job in jobs) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_speculation_that_loses_is_tried_again_ever_more_rarely(seed: int) -> None:
    """It costs a tenth of the time at first, and saves a tenth from batch 300 on."""
    job, changes, allowed = Job(seed), [0], True
    for number in range(800):
        if job.state.attempt.allowed != allowed:
            changes.append(number)
            allowed = not allowed
        job.decode_batch(150, cost=1.1 if number < 300 else 0.9)
    durations = [after - before for before, after in itertools.pairwise(changes)]
    attempts, pauses = durations[::2], durations[1::2]
    assert pauses == [4 * number * tried for number, tried in enumerate(attempts, 1)]
    assert len(pauses) > 1
    # the first attempt that begins when it pays goes on
    assert allowed
    assert sum(change > 300 for change in changes) <= 2
