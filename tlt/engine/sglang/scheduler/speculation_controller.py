"""Choose a strategy for each decode step of SGLang's scheduler, and learn from the results.

Results may arrive after the next step was launched. They arrive in the order of the steps, so a
queue pairs them. How many tokens a request kept is known only after SGLang has looked for stop
tokens, so a step is counted when the next one begins.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter, thread_time
from typing import Any, NamedTuple, Protocol

import torch

from tlt.base.id_types import DrafterVersion
from tlt.base.strategies import Draft, Ngram, Off, Strategy, max_drafts
from tlt.engine.ngram.bounded_ngram_index import AnswerIndex
from tlt.engine.sglang.shared.scheduler_options import SpeculationOptions
from tlt.policies.speculation.configured_policy import ScriptedPolicy, configured_policy
from tlt.policies.speculation.strategy_policy import Choice, StepObservation, rows_by_depth
from tlt.policies.speculation.strategy_runs import StrategyRuns
from tlt.policies.speculation.strategy_tallies import TallyCollector
from tlt.protocol.shared_values import StrategyTally


class Mark(NamedTuple):
    wall: float
    # CPU seconds, or an event of the device
    work: Any


class StepClock:
    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"

    def mark(self) -> Mark:
        """Return this moment; on a GPU the device reaches it later."""
        if self._on_cpu:
            return Mark(perf_counter(), thread_time())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Mark(perf_counter(), event)

    def work_seconds(self, first: Mark, last: Mark) -> float:
        """Return the seconds of work between two marks that the device has passed."""
        if self._on_cpu:
            return last.work - first.work
        return first.work.elapsed_time(last.work) / 1000.0


class RunningText(NamedTuple):
    """A request's prompt, and its answer up to the newest token."""

    name: str
    prompt: Sequence[int]
    answer: Sequence[int]


class ServedRequest(Protocol):
    """A request as SGLang's scheduler knows it."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    # tokens up to its end, or None while it runs
    finished_len: int | None

    def finished(self) -> bool: ...


@dataclass(kw_only=True)
class LaunchedStep:
    """A decode step whose result isn't known yet."""

    choice: Choice
    drafter: DrafterVersion | None
    requests: Sequence[ServedRequest]
    context: int
    # drafts that each row verifies
    width: int
    # when the step before it ended, if nothing else was computed since, or else when it began
    began: Mark
    chosen: Mark
    proposed: Mark | None = None
    # keeping the drafter's cache up to date
    extended: list[tuple[Mark, Mark]] = field(default_factory=list)
    ended: Mark | None = None
    # by row, as soon as the result is known: accepted drafts, and tokens before
    accepted: Sequence[int] = ()
    before: Sequence[int] = ()
    # by request: the tokens that it gained, to be read before the host knows them
    tokens: Callable[[], Sequence[Sequence[int]]] = tuple


class BatchSpeculation:
    def __init__(self, options: SpeculationOptions, clock: StepClock) -> None:
        self._arms = options.arms
        self.clock = clock
        self._launched: deque[LaunchedStep] = deque()
        self._completed: deque[LaunchedStep] = deque()
        self._options = options
        self._runs = self._new_runs()
        self._ngrams: AnswerIndex | None = None
        if any(isinstance(arm, Ngram) for arm in options.arms):
            self._ngrams = AnswerIndex(options.ngram_bytes)
        self._tallies = TallyCollector()
        # requests of the last step
        self._requests: dict[str, ServedRequest] = {}
        # when the last step ended, unless something else was computed since
        self._last_end: Mark | None = None
        self._allowed = True
        self._adopted: DrafterVersion | None = None
        self._update_strategies()

    @property
    def drafter(self) -> DrafterVersion | None:
        return self._adopted if self._allowed else None

    def use_drafter(self, version: DrafterVersion | None) -> None:
        self.count_completed()
        self._adopted = version
        self._last_end = None
        self._update_strategies()
        self._runs.handle_drafter_swap()

    def handle_policy_swap(self) -> None:
        self.count_completed()
        self._last_end = None
        self._runs.handle_weight_swap()

    def allow(self, allowed: bool) -> bool:
        """Decode without drafts, and keep no drafter's cache up to date, while it isn't allowed.

        Return True if it is allowed again.
        """
        if allowed == self._allowed:
            return False
        self.count_completed()
        self._allowed = allowed
        self._last_end = None
        if allowed:
            self._runs = self._new_runs()
        self._update_strategies()
        # steps in flight were chosen without it
        self._runs.handle_drafter_swap()
        return allowed

    def index_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        if self._ngrams is not None:
            self._ngrams.add(prompt, tokens)

    def begin_step(self, requests: Sequence[ServedRequest], context: int) -> LaunchedStep:
        """Choose how these requests decode next; `context` counts the tokens of all."""
        began = self.clock.mark()
        self.count_completed()
        self._note_requests(requests)
        choice = Choice(Off(), 0.0, "only")
        if self._allowed:
            choice = self._runs.choose(len(requests), context)
        proposes = isinstance(choice.strategy, Draft)
        return LaunchedStep(
            choice=choice,
            drafter=self.drafter if proposes else None,
            requests=requests,
            context=context,
            width=max_drafts(choice.strategy) if proposes else 0,
            began=began if self._last_end is None else self._last_end,
            chosen=self.clock.mark(),
        )

    def propose_ngrams(self, texts: Sequence[RunningText], most: int) -> list[list[int]]:
        """Return proposals of at most `most` tokens; none where nothing followed before."""
        index = self._ngrams
        assert index is not None
        # all texts first: the newest tokens of its siblings help a request, too
        for text in texts:
            indexed = index.begin(text.name, text.prompt)
            index.extend(text.name, text.answer[indexed:])
        return [index.propose(text.name, most) for text in texts]

    def answer_so_far(self, request: ServedRequest, length: int) -> Sequence[int]:
        """Return the answer of `length` tokens, with those of results that are still to come."""
        known = request.output_ids
        if len(known) >= length:
            return known[:length]
        answer = list(known)
        for step in self._launched:
            for other, tokens in zip(step.requests, step.tokens(), strict=True):
                if other is request:
                    answer += tokens
        return answer[:length]

    def launch(self, step: LaunchedStep) -> None:
        """Await the result of a step."""
        step.ended = self._last_end = self.clock.mark()
        self._launched.append(step)

    def complete(self, accepted: Sequence[int]) -> None:
        """Note by row how many drafts of the oldest launched step were accepted."""
        step = self._launched.popleft()
        if len(accepted) != len(step.requests):
            raise RuntimeError(
                f"a result of {len(accepted)} rows for a step of {len(step.requests)}: "
                "SGLang's results are not in the order of its steps"
            )
        self.count_completed()
        step.accepted = accepted
        step.before = [len(request.output_ids) for request in step.requests]
        self._completed.append(step)

    def interrupt(self) -> None:
        """Note that something other than a decode step was computed, or nothing at all."""
        self._last_end = None

    def count_completed(self) -> None:
        """Count the steps whose tokens SGLang has handed out."""
        while self._completed:
            self._count(self._completed.popleft())

    def _count_uncounted(self) -> int:
        return len(self._launched) + len(self._completed)

    def take_tallies(self, idle: bool) -> tuple[StrategyTally, ...]:
        """Return what was decoded since the last call; an `idle` engine's runs have ended."""
        if idle:
            self.count_completed()
            self._note_requests((), idle=True)
        return self._tallies.take(idle)

    def _count(self, step: LaunchedStep) -> None:
        assert step.ended is not None
        clock = self.clock
        kept = [
            max(0, _length(request) - before)
            for request, before in zip(step.requests, step.before, strict=True)
        ]
        work = clock.work_seconds(step.began, step.ended)
        extending = sum(clock.work_seconds(*marks) for marks in step.extended)
        # a step without drafts needs no cache of the drafter's
        overhead = extending if step.choice.strategy == Off() else 0.0
        self._tallies.add(
            step.choice,
            step.drafter,
            len(step.requests),
            sum(kept),
            step.ended.wall - step.began.wall,
            work,
            overhead,
        )
        self._runs.observe(self._observation(step, work - overhead, kept))

    def _observation(self, step: LaunchedStep, work: float, kept: Sequence[int]) -> StepObservation:
        strategy = step.choice.strategy
        reached: Sequence[int] = ()
        accepted: Sequence[int] = ()
        if (depth := max_drafts(strategy)) > 0:
            rows = list(zip(step.accepted, kept, strict=True))
            reached = rows_by_depth([min(right + 1, most) for right, most in rows], depth)
            accepted = rows_by_depth([min(pair) for pair in rows], depth)
        proposing = 0.0
        if step.proposed is not None:
            proposing = self.clock.work_seconds(step.chosen, step.proposed)
        return StepObservation(
            strategy,
            len(step.requests),
            step.context,
            work,
            proposing,
            reached,
            accepted,
            step.width,
        )

    def _note_requests(self, requests: Sequence[ServedRequest], idle: bool = False) -> None:
        """Index the answers of requests that have left the batch because they ended.

        Those that were aborted while they waited have ended once the engine is idle.
        """
        if self._ngrams is None:
            return
        present = {request.rid: request for request in requests}
        for name, request in self._requests.items():
            if name not in present and not request.finished() and not idle:
                present[name] = request  # it was retracted, or waits for a result
            elif name not in present:
                tokens = request.output_ids[: _length(request)]
                self._ngrams.end(name, request.origin_input_ids, tokens)
        self._requests = present

    def _new_runs(self) -> StrategyRuns:
        options = self._options
        if options.script:
            policy = ScriptedPolicy(options.script)
        else:
            policy = configured_policy(options.fixed, options.control_share)
        return StrategyRuns(policy, Random(options.seed).random, self._count_uncounted)

    def _update_strategies(self) -> None:
        """Tell the policy which strategies are available: those of a drafter need one."""
        usable: list[Strategy] = []
        if self._allowed:
            ready = self.drafter is not None
            usable = [arm for arm in self._arms if ready or not isinstance(arm, Draft)]
        self._runs.set_strategies(usable or [Off()])


def _length(request: ServedRequest) -> int:
    """Return how many tokens of a request count: those after a stop token don't."""
    tokens = len(request.output_ids)
    return tokens if request.finished_len is None else min(tokens, request.finished_len)
