"""The tail of a rollout batch: when answers finish, how long they are, which ones still run."""

import math

import msgspec

from tlt.base.id_types import Member, PromptIndex, Purpose, Step, WorkerId
from tlt.dashboard.tail_forecast import FinishedAnswer, Forecast, forecast
from tlt.policies.run.chosen_sizes import slots_of
from tlt.policies.run.rollout_batch import RolloutBatch
from tlt.policies.run.run_state import Phase, RunState
from tlt.protocol.events import AnyEvent, RolloutFinished
from tlt.report import Ledger
from tlt.report.batch_lengths_and_finish_times import BatchAnswers

_POINTS = 300
_BINS = 24
_LONGEST = 8
# finished answers that a forecast uses at most
_REMEMBERED = 2000
_FORECAST_SECONDS = 1.0


class RunningAnswer(msgspec.Struct, frozen=True, kw_only=True):
    prompt: PromptIndex
    member: Member
    worker: WorkerId | None
    seconds: float
    attempt: int


class RunningAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """The running answers that the prompt stream knows of, the longest first."""

    longest: tuple[RunningAnswer, ...] = ()
    # seconds that each has been running; any others have run for less than the last of these
    ages: tuple[float, ...] = ()
    running: int = 0

    def add(self, other: "RunningAnswers | None") -> "RunningAnswers":
        """Return these and those of another queue of the job."""
        if other is None or not other.running:
            return self
        longest = sorted((*self.longest, *other.longest), key=lambda each: -each.seconds)
        return RunningAnswers(
            longest=tuple(longest),
            ages=tuple(sorted((*self.ages, *other.ages), reverse=True)),
            running=self.running + other.running,
        )


class CompletionCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds after which answers were finished, in order."""

    step: Step
    purpose: Purpose
    expected: int
    done: tuple[float, ...]
    # answers that each point stands for; the last one stands for the remainder
    stride: int
    answers: int


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    width: int
    counts: tuple[int, ...]


class EarlyEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of a step that ends when enough of them are complete."""

    complete: int
    wanted: int
    issued: int


class TailView(msgspec.Struct, frozen=True, kw_only=True):
    current: CompletionCurve | None
    # of the training batch before the current batch
    previous: CompletionCurve | None
    seconds: float
    lengths: Histogram
    max_tokens: int
    longest: tuple[RunningAnswer, ...]
    running: int
    queued: int
    forecast: Forecast | None
    # None if the step waits for all answers
    early_end: EarlyEnd | None
    # groups that wait for a later step, with the tokens that they have or without
    waiting_groups: int
    # None unless workers decode the next step's answers
    next_step: "NextStep | None" = None


class NextStep(msgspec.Struct, frozen=True, kw_only=True):
    finished: int
    answers: int


class _Batch:
    """Curve and histogram of one rollout batch; each answer is processed once."""

    def __init__(self, answers: BatchAnswers, state: RunState) -> None:
        self.answers = answers
        self.step: Step = state.step
        self.purpose: Purpose = "train" if state.batch is None else state.batch.purpose
        self._group_size = state.spec.algorithm.group_size
        # answers of groups that were carried over may have finished, as those decoded ahead
        known = len(answers.lengths) + answers.dropped - self._extra
        self._issued = 0 if state.batch is None else state.batch.unfinished + known
        self._width = _bin_width(state.spec.rollout.max_new_tokens)
        self._counts = [0] * _BINS
        self._counted = 0
        self._rounded: list[float] = []
        self._curve: CompletionCurve | None = None

    @property
    def expected(self) -> int:
        return self._issued + self._extra

    @property
    def _extra(self) -> int:
        return len(self.answers.extra_prompts) * self._group_size

    def unfinished(self) -> int:
        return self.expected - len(self.answers.lengths) - self.answers.dropped

    def curve(self) -> CompletionCurve:
        new = self.answers.done[len(self._rounded) :]
        expected = self.expected
        if new or self._curve is None or self._curve.expected != expected:
            self._rounded += [round(seconds, 2) for seconds in new]
            self._curve = completion_curve(self._rounded, self.step, self.purpose, expected)
        return self._curve

    def histogram(self) -> Histogram:
        for length in self.answers.lengths[self._counted :]:
            self._counts[min(_BINS - 1, length // self._width)] += 1
        self._counted = len(self.answers.lengths)
        return Histogram(width=self._width, counts=tuple(self._counts))


class RolloutTail:
    def __init__(self) -> None:
        self._batch: _Batch | None = None
        self._previous: _Batch | None = None
        self._finished: list[FinishedAnswer] = []
        self._last_forecast: tuple[_Batch | None, float, Forecast | None] | None = None

    def add(self, ledger: Ledger, event: AnyEvent) -> None:
        state = ledger.state
        if self._batch is None or ledger.batch is not self._batch.answers:
            if state.batch is None:
                return
            if self._batch is not None and self._batch.purpose == "train":
                self._previous = self._batch
            self._batch = _Batch(ledger.batch, state)
        if isinstance(event, RolloutFinished):
            self._finished.append(FinishedAnswer(event.length, event.decode_seconds))
            if len(self._finished) > 2 * _REMEMBERED:
                del self._finished[:_REMEMBERED]

    def view(self, state: RunState, now: float, known: RunningAnswers | None) -> TailView:
        """Return the tail at `now`, with a forecast only where the running answers are known."""
        batch = state.batch
        is_open = batch is not None and not batch.settled and state.phase is not Phase.ENDED
        answers = (known if is_open else None) or RunningAnswers()
        max_tokens = state.spec.rollout.max_new_tokens
        queued = 0
        if is_open and self._batch is not None:
            ahead = 0 if state.ahead is None else state.ahead.unfinished
            queued = max(0, self._batch.unfinished() + ahead - answers.running)
        return TailView(
            current=None if self._batch is None else self._batch.curve(),
            previous=None if self._previous is None else self._previous.curve(),
            seconds=0.0 if batch is None or not is_open else now - batch.opened_at,
            lengths=Histogram(width=_bin_width(max_tokens), counts=(0,) * _BINS)
            if self._batch is None
            else self._batch.histogram(),
            max_tokens=max_tokens,
            longest=answers.longest[:_LONGEST],
            running=answers.running,
            queued=queued,
            forecast=self._forecast(state, now, answers, queued)
            if is_open and known is not None and _ends_with_last(state)
            else None,
            early_end=_early_end(batch) if is_open and batch is not None else None,
            waiting_groups=state.waiting_groups,
            next_step=_next_step(state),
        )

    def _forecast(
        self, state: RunState, now: float, answers: RunningAnswers, queued: int
    ) -> Forecast | None:
        """Return a forecast that is at most a second old."""
        last = self._last_forecast
        if last is not None and last[0] is self._batch and 0.0 <= now - last[1] < _FORECAST_SECONDS:
            return last[2]
        made = forecast(
            answers.ages,
            self._finished,
            state.spec.rollout.max_new_tokens,
            queued,
            sum(slots_of(state, known) for known in state.workers.values()),
            max(0, answers.running - len(answers.ages)),
        )
        self._last_forecast = self._batch, now, made
        return made


def _ends_with_last(state: RunState) -> bool:
    """Return True if the step at hand ends with the last of all answers that are running."""
    return state.batch is not None and state.batch.wanted is None and state.ahead is None


def _next_step(state: RunState) -> NextStep | None:
    if state.ahead is None:
        return None
    answers = len(state.ahead.lengths())
    return NextStep(finished=answers - state.ahead.unfinished, answers=answers)


def _early_end(batch: RolloutBatch) -> EarlyEnd | None:
    if batch.wanted is None:
        return None
    return EarlyEnd(complete=batch.complete, wanted=batch.wanted, issued=len(batch.groups))


def completion_curve(
    done: list[float], step: Step, purpose: Purpose, expected: int
) -> CompletionCurve:
    """Thin out the points, but keep the last one: the tail consists of the last answers."""
    stride = max(1, math.ceil(len(done) / _POINTS))
    points = done[stride - 1 :: stride] + (done[-1:] if len(done) % stride else [])
    return CompletionCurve(
        step=step,
        purpose=purpose,
        expected=expected,
        done=tuple(points),
        stride=stride,
        answers=len(done),
    )


def expected_answers(state: RunState) -> int:
    if state.batch is None:
        return 0
    return sum(len(group.members) for group in state.batch.groups.values())


def _bin_width(max_tokens: int) -> int:
    return max(1, math.ceil(max_tokens / _BINS))
