"""Choose a strategy for each step, propose its drafts and learn from the outcome.

Speculation never changes the tokens. A strategy that cannot propose, because there is no drafter or
nothing followed these words before, leaves a step without drafts.
"""

from collections.abc import Callable, Sequence
from random import Random
from time import perf_counter, thread_time

import torch

from tlt.base.id_types import DrafterVersion
from tlt.base.strategies import Draft, Ngram, Off, Strategy, max_drafts
from tlt.engine.native.drafter_proposer import DrafterProposer
from tlt.engine.native.ngram_proposer import NgramProposer
from tlt.engine.native.policy_forward import PolicyWeights
from tlt.engine.native.running_batch_tensors import Row, RunningBatch, StepNoise, StepOutcome
from tlt.engine.native.slot_storage import SlotTensors
from tlt.errors import ConfigError
from tlt.models.eagle_drafter import Drafter, describe_misfit
from tlt.policies.speculation.strategy_policy import (
    Choice,
    StepObservation,
    StrategyPolicy,
    rows_by_depth,
)
from tlt.policies.speculation.strategy_runs import StrategyRuns
from tlt.policies.speculation.strategy_tallies import TallyCollector
from tlt.protocol.shared_values import StrategyTally

# the processor share is measured over the last seconds: this many, or half of them
_SHARE_SECONDS = 20.0


class SpeculationController:
    def __init__(
        self,
        strategies: Sequence[Strategy],
        weights: PolicyWeights,
        slots: SlotTensors,
        rows: int,
        ngram_bytes: int,
    ) -> None:
        self._strategies = strategies
        self._most_drafts = max(map(max_drafts, strategies), default=0)
        self._weights = weights
        self._slots = slots
        self._count = rows
        self.drafter_version: DrafterVersion | None = None
        self._drafter: DrafterProposer | None = None
        self._ngrams: NgramProposer | None = None
        if any(isinstance(each, Ngram) for each in strategies):
            self._ngrams = NgramProposer(slots, ngram_bytes)
        self._fixed = Choice(Off(), 0.0, "only")
        # None while no policy chooses
        self._runs: StrategyRuns | None = None
        self._new_runs: Callable[[], StrategyRuns] | None = None
        self._tallies = TallyCollector()
        # True while states are kept for drafter training
        self._capturing = True
        # seconds spent on keeping states up to the last decode step, and on learning from that step
        self._keeping_before = self._learning = 0.0
        self._share = ProcessorShare()

    @property
    def bytes(self) -> int:
        """Count the memory of the proposers; the n-gram index counts as its budget."""
        drafter = self._drafter.bytes if self._drafter is not None else 0
        return drafter + (self._ngrams.index.budget if self._ngrams is not None else 0)

    def set_strategy(self, strategy: Strategy) -> None:
        """Always decode with this strategy."""
        least, count = (0 if strategy == Off() else 1), max_drafts(strategy)
        if not least <= count <= self._most_drafts:
            raise ConfigError(f"{count} drafts per step, where {least} to {self._most_drafts} fit")
        if isinstance(strategy, Ngram) and self._ngrams is None:
            raise ConfigError("n-grams are not among the strategies that this engine was made for")
        self._fixed = Choice(strategy, 0.0, "only")
        self._runs = self._new_runs = None
        self.update_capturing()

    def set_policy(self, make: Callable[[], StrategyPolicy], seed: int) -> None:
        """Let a policy choose the strategy of each step."""
        self._fixed = Choice(Off(), 0.0, "only")
        self._new_runs = lambda: StrategyRuns(make(), Random(seed).random)
        self._runs = self._new_runs()
        self.update_capturing()
        self._update_strategies()

    def allow(self, allowed: bool) -> None:
        """Decode without drafts while it isn't allowed, then with a new policy."""
        if self._new_runs is None or allowed == (self._runs is not None):
            return
        self._runs = self._new_runs() if allowed else None
        self.update_capturing()
        self._update_strategies()

    def adopt_drafter(self, version: DrafterVersion, drafter: Drafter) -> None:
        if (complaint := describe_misfit(drafter, self._weights.config)) is not None:
            raise ConfigError(f"drafter version {version} does not fit the policy: {complaint}")
        if missing := set(drafter.config.captured) - set(self._slots.states.layers):
            raise ConfigError(
                f"drafter version {version} reads the states of layers {sorted(missing)}, "
                "which this engine does not keep"
            )
        self._drafter = None  # its memory is freed before the next one's is allocated
        depth = max(self._most_drafts, 1)
        self._drafter = DrafterProposer(drafter, self._weights, self._slots, self._count, depth)
        self._set_drafter_version(version)

    def drop_drafter(self) -> None:
        self._drafter = None
        self._set_drafter_version(None)

    def set_capturing(self, capture: bool) -> None:
        self._capturing = capture
        self.update_capturing()

    def release_memory(self) -> None:
        if self._drafter is not None:
            self._drafter.release_memory()

    def restore_memory(self) -> None:
        if self._drafter is not None:
            self._drafter.restore_memory()

    def handle_weight_swap(self) -> None:
        if self._drafter is not None:
            self._drafter.handle_weight_swap()
        if self._runs is not None:
            self._runs.handle_weight_swap()

    def start_step(self, batch: RunningBatch) -> "StepTimer":
        return StepTimer(batch, self._slots.states.seconds)

    def choose(self, batch: RunningBatch) -> Choice:
        if self._runs is None:
            return self._fixed
        return self._runs.choose(len(batch.rows), batch.context)

    def propose(
        self, strategy: Strategy, batch: RunningBatch, noise: StepNoise
    ) -> torch.Tensor | None:
        """Return drafts [rows, some], or None if there are none for any row."""
        match strategy:
            case Draft(depth=depth, noise=shared) if self._drafter is not None:
                return self._drafter.propose(batch, depth, noise.all() if shared else None)
            case Ngram(tokens=most) if self._ngrams is not None:
                return self._ngrams.propose(batch, most)
            case _:
                return None

    def observe(self, choice: Choice, timer: "StepTimer", outcome: StepOutcome) -> None:
        """Count a step and learn from it."""
        pass_work, ended = timer.work_seconds(), perf_counter()
        share = self._share.update(pass_work, ended - timer.began - timer.choosing_seconds)
        keeping, kept_before = self._slots.states.seconds, self._keeping_before
        self._keeping_before = keeping
        # prefills before the step have kept states as well
        outside = timer.keeping_before - kept_before + self._learning
        overhead = timer.choosing_seconds + keeping - kept_before + self._learning
        drafter = self.drafter_version if isinstance(choice.strategy, Draft) else None
        tokens, seconds = sum(outcome.kept), ended - timer.began + outside
        work = pass_work + share * (timer.choosing_seconds + outside)
        self._tallies.add(choice, drafter, timer.rows, tokens, seconds, work, share * overhead)
        if self._runs is not None:
            began = perf_counter()
            self._learn(self._runs, choice, timer, outcome, pass_work)
            self._learning = perf_counter() - began

    def _learn(
        self,
        runs: StrategyRuns,
        choice: Choice,
        timer: "StepTimer",
        outcome: StepOutcome,
        work: float,
    ) -> None:
        if (depth := max_drafts(choice.strategy)) == 0:
            runs.observe_plain(timer.rows, timer.context, work)
            return
        # drafts that were not even proposed count as rejected
        checked, right = count_drafts(outcome)
        reached, accepted = rows_by_depth(checked, depth), rows_by_depth(right, depth)
        runs.observe(
            StepObservation(
                choice.strategy,
                timer.rows,
                timer.context,
                work,
                timer.proposal_seconds,
                reached,
                accepted,
                timer.width,
            )
        )

    def index_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        if self._ngrams is not None:
            self._ngrams.index.add(prompt, tokens)

    def take_tallies(self, idle: bool) -> tuple[StrategyTally, ...]:
        return self._tallies.take(idle)

    def handle_row_move(self, row: Row, source: int, target: int) -> None:
        if self._drafter is not None:
            self._drafter.handle_row_move(row, source, target)

    def handle_row_end(self, row: Row, tokens: Sequence[int]) -> None:
        if self._drafter is not None:
            self._drafter.handle_row_end(row)
        if self._ngrams is not None:
            self._ngrams.handle_row_end(row, tokens)

    def _set_drafter_version(self, version: DrafterVersion | None) -> None:
        self.drafter_version = version
        self.update_capturing()
        self._update_strategies()
        if self._runs is not None:
            self._runs.handle_drafter_swap()

    def update_capturing(self) -> None:
        """Keep states only while drafters learn from them or propose with them."""
        proposes = self._runs is not None or isinstance(self._fixed.strategy, Draft)
        self._slots.states.enable(self._capturing or (self._drafter is not None and proposes))

    def _update_strategies(self) -> None:
        """Tell the policy which strategies are available: those of a drafter need one."""
        if self._runs is not None:
            ready = self._drafter is not None
            usable = [each for each in self._strategies if ready or not isinstance(each, Draft)]
            self._runs.set_strategies(usable or [Off()])


class ProcessorShare:
    """The share of the time in which this thread computes: other programs use its core, too.

    Short stretches are timed by the wall clock, which takes a fifth of a CPU clock's time to read,
    and multiplied with this share.
    """

    def __init__(self) -> None:
        self._work = self._wall = 0.0

    def update(self, work: float, wall: float) -> float:
        self._work += work
        self._wall += wall
        if self._wall > _SHARE_SECONDS:
            self._work, self._wall = 0.5 * self._work, 0.5 * self._wall
        return min(1.0, self._work / self._wall) if self._wall > 0.0 else 1.0


class StepTimer:
    """Measure a step's seconds and remember the batch that it began with."""

    def __init__(self, batch: RunningBatch, keeping_before: float) -> None:
        # CPU time: other programs on the machine must not make a strategy look slow
        self._clock = thread_time if batch.newest.device.type == "cpu" else perf_counter
        self.began = perf_counter()
        # seconds that keeping states had taken by then
        self.keeping_before = keeping_before
        self._work_began = self.choosing_seconds = 0.0
        self.rows = len(batch.rows)
        self.context = batch.context
        self.proposal_seconds = 0.0
        # drafts per row
        self.width = 0

    def mark_chosen(self) -> None:
        self._work_began = self._clock()
        self.choosing_seconds = perf_counter() - self.began

    def mark_proposed(self, drafts: torch.Tensor | None) -> None:
        self.proposal_seconds = self.work_seconds()
        self.width = 0 if drafts is None else drafts.shape[1]

    def work_seconds(self) -> float:
        return self._clock() - self._work_began


def count_drafts(outcome: StepOutcome) -> tuple[list[int], list[int]]:
    """Return how many drafts of each row the policy checked, and how many of them it accepted.

    Drafts beyond an answer's end count as neither.
    """
    both = list(zip(outcome.accepted, outcome.kept, strict=True))
    return [min(agreed + 1, kept) for agreed, kept in both], [min(pair) for pair in both]
