"""The tail of the round in hand: how its answers come in, how long they are, who still writes."""

import math

import msgspec

from tlt.dashboard.tail_forecast import Done, Forecast, forecast
from tlt.ids import Member, PromptIndex, Purpose, Step, WorkerId
from tlt.policies.job.run_state import Phase, RunState
from tlt.protocol.events import AnyEvent, RolloutFinished
from tlt.report import Ledger
from tlt.report.answer_lengths import Answers

_POINTS = 300
_BINS = 24
_LONGEST = 8
# answers that a forecast may remember
_REMEMBERED = 2000
_FORECAST_SECONDS = 1.0


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that a worker has in hand."""

    prompt: PromptIndex
    member: Member
    worker: WorkerId | None
    seconds: float
    attempt: int


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What the queue tells of the round in hand: the longest first."""

    longest: tuple[Held, ...] = ()
    # how long each has been in hand, and of the others less than the last of them
    ages: tuple[float, ...] = ()
    running: int = 0


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Answers by the seconds after which they were there."""

    step: Step
    purpose: Purpose
    expected: int
    done: tuple[float, ...]
    # how many answers each point stands for; the last one for as many as are left
    stride: int
    answers: int


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    width: int
    counts: tuple[int, ...]


class TailView(msgspec.Struct, frozen=True, kw_only=True):
    now: Curve | None
    before: Curve | None
    seconds: float
    lengths: Histogram
    room: int
    longest: tuple[Held, ...]
    running: int
    queued: int
    forecast: Forecast | None


class _Round:
    """Every answer is looked at once, however often it is told."""

    def __init__(self, answers: Answers, state: RunState) -> None:
        self.answers = answers
        self.step: Step = state.step
        self.purpose: Purpose = _purpose(state)
        self.expected = _expected(state)
        self._width = _width(state.spec.rollout.max_new_tokens)
        self._counts = [0] * _BINS
        self._counted = 0
        # rounded
        self._done: list[float] = []
        self._curve: Curve | None = None

    def curve(self) -> Curve:
        news = self.answers.done[len(self._done) :]
        if news or self._curve is None:
            self._done += [round(seconds, 2) for seconds in news]
            self._curve = self._drawn()
        return self._curve

    def _drawn(self) -> Curve:
        done = self._done
        stride = max(1, math.ceil(len(done) / _POINTS))
        points = done[stride - 1 :: stride] + (done[-1:] if len(done) % stride else [])
        return Curve(
            step=self.step,
            purpose=self.purpose,
            expected=self.expected,
            done=tuple(points),
            stride=stride,
            answers=len(done),
        )

    def histogram(self) -> Histogram:
        for length in self.answers.lengths[self._counted :]:
            self._counts[min(_BINS - 1, length // self._width)] += 1
        self._counted = len(self.answers.lengths)
        return Histogram(width=self._width, counts=tuple(self._counts))


class Tail:
    def __init__(self) -> None:
        self._round: _Round | None = None
        self._before: _Round | None = None
        self._finished: list[Done] = []
        self._foretold: tuple[_Round | None, float, Forecast | None] | None = None

    def watch(self, ledger: Ledger, event: AnyEvent) -> None:
        state = ledger.state
        if self._round is None or ledger.batch is not self._round.answers:
            if state.batch is None:
                return
            if self._round is not None and self._round.purpose == "train":
                self._before = self._round
            self._round = _Round(ledger.batch, state)
        if isinstance(event, RolloutFinished):
            self._finished.append(Done(event.length, event.decode_seconds))
            if len(self._finished) > 2 * _REMEMBERED:
                del self._finished[:_REMEMBERED]

    def _unfinished(self) -> int:
        if self._round is None:
            return 0
        answers = self._round.answers
        return self._round.expected - len(answers.lengths) - answers.dropped

    def view(self, state: RunState, now: float, known: Holding | None) -> TailView:
        """`known`: what is in hand, where somebody knows it: without it nothing is foretold."""
        holding = known or Holding()
        room = state.spec.rollout.max_new_tokens
        open_ = (
            state.batch is not None and not state.batch.settled and state.phase is not Phase.ENDED
        )
        queued = max(0, self._unfinished() - holding.running) if open_ else 0
        return TailView(
            now=None if self._round is None else self._round.curve(),
            before=None if self._before is None else self._before.curve(),
            seconds=now - state.batch_opened_at if open_ else 0.0,
            lengths=Histogram(width=_width(room), counts=(0,) * _BINS)
            if self._round is None
            else self._round.histogram(),
            room=room,
            longest=holding.longest[:_LONGEST] if open_ else (),
            running=holding.running if open_ else 0,
            queued=queued,
            forecast=self._forecast(state, now, holding, queued)
            if open_ and known is not None
            else None,
        )

    def _forecast(
        self, state: RunState, now: float, holding: Holding, queued: int
    ) -> Forecast | None:
        """Made once a second."""
        last = self._foretold
        if last is not None and last[0] is self._round and 0.0 <= now - last[1] < _FORECAST_SECONDS:
            return last[2]
        slots = sum(known.info.ranks for known in state.workers.values())
        made = forecast(
            holding.ages,
            self._finished,
            state.spec.rollout.max_new_tokens,
            queued,
            slots * state.spec.rollout.slots,
            max(0, holding.running - len(holding.ages)),
        )
        self._foretold = self._round, now, made
        return made


def _width(room: int) -> int:
    return max(1, math.ceil(room / _BINS))


def _purpose(state: RunState) -> Purpose:
    return "train" if state.batch is None else state.batch.purpose


def _expected(state: RunState) -> int:
    if state.batch is None:
        return 0
    return sum(len(group.members) for group in state.batch.groups.values())
