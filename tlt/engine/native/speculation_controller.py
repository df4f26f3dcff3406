"""Who guesses what follows, and who says which of them does: never what the tokens are.

A way that cannot guess here, because there is no drafter yet or nothing has followed these words
before, leaves a round in which nothing is guessed.
"""

from collections.abc import Sequence
from random import Random
from time import perf_counter, thread_time

import torch

from tlt.engine.native.drafter_proposer import DrafterProposer
from tlt.engine.native.ngram_acceptance_probe import TOLD, NgramAcceptanceProbe
from tlt.engine.native.ngram_proposer import NgramProposer
from tlt.engine.native.policy_weights import PolicyWeights
from tlt.engine.native.running_batch import Row, RunningBatch, StepNoise, StepOutcome
from tlt.engine.native.slot_tensors import SlotTensors
from tlt.errors import ConfigError
from tlt.ids import DrafterVersion
from tlt.models.eagle_drafter import Drafter, DrafterConfig, new_drafter
from tlt.policies.speculation.strategy_policy import Choice, StrategyPolicy
from tlt.policies.speculation.strategy_tallies import TallyCollector
from tlt.protocol.records import StrategyTally
from tlt.strategies import Draft, Ngram, Off, Strategy, max_drafts


class SpeculationController:
    def __init__(
        self,
        arms: Sequence[Strategy],
        weights: PolicyWeights,
        slots: SlotTensors,
        rows: int,
        ngram_bytes: int,
    ) -> None:
        self.longest = longest_draft(arms)
        self.version: DrafterVersion | None = None
        self._arms = arms
        self._weights = weights
        self._slots = slots
        self._count = rows
        self._drafting: DrafterProposer | None = None
        self._lookup: NgramProposer | None = None
        self._checks: NgramAcceptanceProbe | None = None
        if ngrams := [arm.tokens for arm in arms if isinstance(arm, Ngram)]:
            self._lookup = NgramProposer(slots, ngram_bytes)
            self._checks = NgramAcceptanceProbe(self._lookup, slots, max(ngrams))
        self._fixed: Strategy = Off()
        self._policy: StrategyPolicy | None = None
        # rows of the last round
        self._batch = 0
        self._dice = Random(0)
        self._tallies = TallyCollector()

    @property
    def bytes(self) -> int:
        """The index counts as what it may come to hold."""
        drafting = self._drafting.bytes if self._drafting is not None else 0
        return drafting + (self._lookup.budget if self._lookup is not None else 0)

    def bytes_of(self, config: DrafterConfig) -> int:
        """What adopting such a drafter takes, if there is none yet."""
        with torch.device("meta"):  # tensors without memory
            drafter, policy = new_drafter(config), self._weights.without_memory()
            return self._made(drafter, policy).bytes

    def decode_with(self, strategy: Strategy) -> None:
        least, count = (0 if strategy == Off() else 1), max_drafts(strategy)
        if not least <= count <= self.longest:
            raise ConfigError(f"{count} tokens guessed, where {least} to {self.longest} fit")
        if isinstance(strategy, Ngram) and self._lookup is None:
            raise ConfigError("n-grams are not among the ways that this engine was made for")
        self._fixed, self._policy = strategy, None

    def let(self, policy: StrategyPolicy, seed: int) -> None:
        self._policy, self._dice = policy, Random(seed)
        self._offer()

    def adopt(self, version: DrafterVersion, drafter: Drafter, running: Sequence[Row]) -> None:
        self._drafting = None  # its memory goes before the next one's comes
        self._drafting = self._made(drafter, self._weights)
        self.version = version
        for row in running:
            row.drafted = 0
        self._offer()
        if self._policy is not None:
            self._policy.handle_drafter_swap()

    def forget(self) -> None:
        """The drafter, if there is one."""
        self._drafting = self.version = None
        self._offer()
        if self._policy is not None:
            self._policy.handle_drafter_swap()

    def handle_weight_swap(self) -> None:
        self._tell_checks(least=1)
        if self._policy is not None:
            self._policy.handle_weight_swap()

    def choose(self, batch: RunningBatch) -> Choice:
        if self._policy is None:
            return Choice(self._fixed, 0.0, "only")
        return self._policy.choose(len(batch.rows), batch.context, self._dice.random())

    def guess(
        self, strategy: Strategy, batch: RunningBatch, noise: StepNoise
    ) -> torch.Tensor | None:
        """Drafts [rows, some]; None if nobody knows any."""
        match strategy:
            case Draft(depth=depth, noise=shared) if self._drafting is not None:
                return self._drafting.propose(batch, depth, noise.all() if shared else None)
            case Ngram(tokens=most) if self._lookup is not None:
                return self._lookup.propose(batch, most)
            case _:
                return None

    def observe(
        self, choice: Choice, round: "StepTimer", batch: RunningBatch, verdict: StepOutcome
    ) -> None:
        """`batch` as it is after the round."""
        work = round.work()
        self._batch = round.rows
        self._check(choice, batch)
        seconds = perf_counter() - round.began
        drafter = self.version if isinstance(choice.strategy, Draft) else None
        self._tallies.add(choice, drafter, round.rows, sum(verdict.kept), seconds, work)
        if self._policy is None:
            return
        reached, accepted = count_drafts(verdict)
        # what was not even proposed is refused
        depths = range(max_drafts(choice.strategy))
        self._policy.observe(
            choice.strategy,
            round.rows,
            round.context,
            work,
            round.drafting,
            [sum(count > depth for count in reached) for depth in depths],
            [sum(count > depth for count in accepted) for depth in depths],
            round.drafts,
        )

    def overhear(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """What was answered elsewhere."""
        if self._lookup is not None:
            self._lookup.overhear(prompt, tokens)

    def tallies(self, over: bool) -> tuple[StrategyTally, ...]:
        """Since they were last asked for. `over`: nothing runs any more."""
        return self._tallies.taken(over)

    def moved(self, row: Row, source: int, target: int) -> None:
        if self._drafting is not None:
            self._drafting.copy(source, target, row.drafted)

    def ended(self, row: Row, index: int, step: int) -> None:
        place = row.position(step)
        if self._checks is not None:
            self._checks.ended(row, index, place)
        if self._lookup is not None:
            self._lookup.ended(row, index, place)

    def _check(self, choice: Choice, batch: RunningBatch) -> None:
        """Where n-grams decode themselves they are judged by that (and by what was open before);
        what speculation is measured against decodes and does nothing else."""
        if self._checks is None or self._policy is None:
            return
        if choice.why != "control" and not isinstance(choice.strategy, Ngram):
            self._checks.look(batch)
        self._tell_checks()

    def _tell_checks(self, least: int = TOLD) -> None:
        if self._checks is None or self._policy is None:
            return
        count_drafts = self._checks.taken(least)
        if count_drafts is not None:
            self._policy.observe_probe(
                Ngram(tokens=len(count_drafts.reached)), self._batch, *count_drafts
            )

    def _made(self, drafter: Drafter, policy: PolicyWeights) -> DrafterProposer:
        return DrafterProposer(drafter, policy, self._slots, self._count, max(self.longest, 1))

    def _offer(self) -> None:
        if self._policy is not None:
            self._policy.set_strategies(self._offered())

    def _offered(self) -> list[Strategy]:
        drafter = self._drafting is not None
        return [arm for arm in self._arms if drafter or not isinstance(arm, Draft)] or [Off()]


class StepTimer:
    """What a round was, as far as its cost goes."""

    def __init__(self, batch: RunningBatch) -> None:
        # On a CPU, whoever else runs on the machine makes no way of decoding look slow.
        self._clock = thread_time if batch.newest.device.type == "cpu" else perf_counter
        self.began = perf_counter()
        self._work_began = self._clock()
        self.rows = len(batch.rows)
        self.context = batch.context
        self.drafting = 0.0
        self.drafts = 0

    def guessed(self, drafts: torch.Tensor | None) -> None:
        self.drafting = self.work()
        self.drafts = 0 if drafts is None else drafts.shape[1]

    def work(self) -> float:
        """Seconds, by now."""
        return self._clock() - self._work_began


def count_drafts(verdict: StepOutcome) -> tuple[list[int], list[int]]:
    """By row: drafts that the policy had a say on, and those of them that it drew as well.

    Beyond an answer's end there is nothing to agree with.
    """
    both = list(zip(verdict.accepted, verdict.kept, strict=True))
    return [min(agreed + 1, kept) for agreed, kept in both], [min(pair) for pair in both]


def longest_draft(arms: Sequence[Strategy]) -> int:
    return max((max_drafts(arm) for arm in arms), default=0)
