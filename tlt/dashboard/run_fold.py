"""One run, folded from the part of its journal that has been read."""

import time
from collections import deque
from pathlib import Path

import msgspec

from tlt.base.id_types import JobId, JobStatus
from tlt.dashboard.answer_samples import Samples
from tlt.dashboard.recent_errors import RecentErrors
from tlt.dashboard.rollout_tail import RolloutTail
from tlt.dashboard.step_times import StepTimes
from tlt.errors import JournalError
from tlt.loggers import delivery_state
from tlt.protocol.commands import (
    Command,
    ContinueJob,
    EndJob,
    RecordRolloutBatch,
    StartJob,
    SuspendJob,
)
from tlt.protocol.events import AnyEvent, DecodingReported, DrafterDeltaReady, RolloutFinished
from tlt.report import Attempts, Ledger, StrategyUsage, Transition, WorkerLanes
from tlt.report.journal_log_lines import log_lines
from tlt.spec.config import JobSpec
from tlt.store.journal import FILE_NAME, START, JournalEntry, Position, follow

_RATE_SECONDS = 10.0


class TokenRate:
    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, at: float, tokens: int) -> None:
        self._recent.append((at, tokens))
        self._sum += tokens
        self._drop_old(at)

    def tokens_per_second(self, now: float) -> float:
        self._drop_old(now)
        return self._sum / _RATE_SECONDS

    def _drop_old(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _RATE_SECONDS:
            self._sum -= self._recent.popleft()[1]


_LOG_LINES = 2000
_LOSSES = 2000
# unread bytes that take a noticeable time to fold
LARGE_BACKLOG = 4 << 20
# entries between two checks of the time budget
_STRIDE = 16


class LossPoint(msgspec.Struct, frozen=True, array_like=True):
    at: float
    loss: float


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    number: int
    at: float
    text: str


class Run:
    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self.folder = folder
        self.spec = spec
        self._failed: Position | None = None
        self.reset()

    def reset(self) -> None:
        """Start again from the first entry."""
        self.position = START
        # times of the first and the last entry
        self.began: float | None = None
        self.last_entry = 0.0
        self.status: JobStatus = "queued"
        self.error: str | None = None
        self.ledger = Ledger(JobId(self.folder.name), self.spec, by_worker=False)
        self.step_times = StepTimes()
        self.lanes = WorkerLanes()
        self.attempts = Attempts()
        self.strategy_usage = StrategyUsage()
        self.tail = RolloutTail()
        self.token_rate = TokenRate()
        self.samples = Samples(self.folder, self.spec)
        self.losses: deque[LossPoint] = deque(maxlen=_LOSSES)
        self.errors = RecentErrors()
        # every held-out answer scored 0 or 1, so that their mean reward is an accuracy
        self.binary_rewards = True
        self.log_lines: deque[LogLine] = deque(maxlen=_LOG_LINES)
        self.new_log_lines: list[LogLine] = []
        self._line_number = 0

    @property
    def ended(self) -> bool:
        return self.ledger.ended

    def failed_loggers(self) -> dict[str, str]:
        """Return the loggers that are not called any more, each with its error."""
        errors = {name: delivery_state.read(self.folder, name).error for name in self.spec.loggers}
        return {name: error for name, error in errors.items() if error is not None}

    @property
    def unread(self) -> int:
        """Count the bytes of the journal that are not folded yet."""
        try:
            return (self.folder / FILE_NAME).stat().st_size - self.position.bytes
        except FileNotFoundError:
            return 0

    @property
    def share_read(self) -> float:
        return self.position.bytes / max(1, self.position.bytes + self.unread)

    @property
    def has_large_backlog(self) -> bool:
        return self.unread >= LARGE_BACKLOG

    def advance(self, budget: float) -> bool:
        """Fold new entries for at most `budget` seconds; return True if there were any."""
        unread = self.unread
        if unread < 0:
            raise JournalError(f"{self.folder / FILE_NAME}: shorter than it was")
        if unread == 0:
            return False
        deadline = time.monotonic() + budget
        first = self.position
        for count, (entry, after) in enumerate(follow(self.folder / FILE_NAME, self.position)):
            self._add(entry)
            self.position = after
            if count % _STRIDE == 0 and time.monotonic() > deadline:
                break
        return self.position != first

    def catch_up(self, budget: float) -> bool:
        """Call `advance`, and start again once where entries that were read have been removed."""
        try:
            return self.advance(budget)
        except JournalError:
            if self.position == self._failed:
                raise  # reading it again did not help: the journal is damaged
            self._failed = self.position
            self.reset()
            return True

    def discard_pending(self) -> bool:
        """Drop changes that no listener receives; return True if there were any."""
        update = self.lanes.take_update()
        found = bool(self.new_log_lines or update.changes or update.batches or update.marks)
        self.new_log_lines = []
        return found

    def _add(self, entry: JournalEntry) -> None:
        event = entry.event
        if isinstance(event, StartJob):
            self.began = entry.at
        if isinstance(event, StartJob | ContinueJob):
            self.status = "running"
        self.last_entry = max(self.last_entry, entry.at)
        at = 0.0 if self.began is None else round(entry.at - self.began, 3)
        transition = self.ledger.add(event, entry.at)
        self.lanes.add(transition, at)
        self.attempts.add(transition, at)
        self.tail.add(self.ledger, event)
        self.samples.add(event)
        self.errors.add(transition.before, event, transition.after, at)
        if transition.counts:
            self._add_event(event, at)
        self._add_log_lines(transition, at)
        for command in transition.commands:
            self._add_command(command)

    def _add_command(self, command: Command) -> None:
        match command:
            case SuspendJob():
                self.status = "paused"
            case EndJob():
                self.status, self.error = command.status, command.error
            case RecordRolloutBatch(purpose="eval"):
                self.binary_rewards &= all(reward in (0.0, 1.0) for reward in command.rewards)
            case _:
                pass

    def _add_event(self, event: AnyEvent, at: float) -> None:
        match event:
            case DecodingReported():
                self.strategy_usage.add(event, at)
                self.token_rate.add(at, sum(tally.tokens for tally in event.tallies))
            case RolloutFinished() if not self.ledger.spec.speculation.arms:
                self.token_rate.add(at, event.length)
            case DrafterDeltaReady():
                self.losses.append(LossPoint(at, event.loss))
            case _:
                pass

    def _add_log_lines(self, transition: Transition, at: float) -> None:
        for text in log_lines(self.ledger, transition):
            self._line_number += 1
            line = LogLine(self._line_number, at, text)
            self.log_lines.append(line)
            self.new_log_lines.append(line)
