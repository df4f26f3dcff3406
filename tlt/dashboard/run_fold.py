"""One run, folded from its journal as far as that goes by now."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tlt.config import JobSpec
from tlt.dashboard.answer_samples import Samples
from tlt.dashboard.recent_errors import RecentErrors
from tlt.dashboard.rollout_tail import Tail
from tlt.dashboard.step_times import StepTimes
from tlt.dashboard.token_rate import Pace
from tlt.errors import ConfigError, JournalError
from tlt.ids import JobId, JobStatus
from tlt.loggers import delivered
from tlt.policies.job.run_state import RunState
from tlt.protocol.commands import Command, FinishRun, RecordRolloutBatch
from tlt.protocol.events import (
    AnyEvent,
    DecodingReported,
    DrafterDeltaReady,
    JobStarted,
    RolloutFinished,
)
from tlt.report import Attempts, Lanes, Ledger, Ways
from tlt.report.log_lines import Narrator
from tlt.store.journal import FILE_NAME, START, JournalEntry, Position, follow

_LINES = 2000
_LOSSES = 2000
# bytes that take a moment to fold
_MUCH = 4 << 20
# entries between two looks at the clock
_STRIDE = 16


class Loss(msgspec.Struct, frozen=True, array_like=True):
    at: float
    loss: float


class Line(msgspec.Struct, frozen=True, array_like=True):
    number: int
    at: float
    text: str


class Run:
    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self.folder = folder
        self.spec = spec
        self._failed: Position | None = None
        self.begin()

    def begin(self) -> None:
        """From the first entry on: what was read may have been taken back."""
        self.position = START
        # of the first entry, and of the last one
        self.began: float | None = None
        self.heard = 0.0
        self.status: JobStatus = "queued"
        self.error: str | None = None
        self.ledger = Ledger(JobId(self.folder.name), self.spec, by_worker=False)
        self.step_times = StepTimes()
        self.narrator = Narrator(self.ledger)
        self.lanes = Lanes()
        self.attempts = Attempts()
        self.ways = Ways()
        self.tail = Tail()
        self.pace = Pace()
        self.samples = Samples(self.folder, self.spec)
        self.losses: deque[Loss] = deque(maxlen=_LOSSES)
        self.mishaps = RecentErrors()
        # of every held-out answer, so that their mean reward is an accuracy
        self.right_or_wrong = True
        self.lines: deque[Line] = deque(maxlen=_LINES)
        self.new_lines: list[Line] = []
        self._line = 0

    @property
    def ended(self) -> bool:
        return self.ledger.ended

    def failed_loggers(self) -> dict[str, str]:
        """Which are left alone, and why."""
        errors = {name: delivered.read(self.folder, name).error for name in self.spec.loggers}
        return {name: error for name, error in errors.items() if error is not None}

    @property
    def unread(self) -> int:
        """Bytes of the journal."""
        try:
            return (self.folder / FILE_NAME).stat().st_size - self.position.bytes
        except FileNotFoundError:
            return 0

    @property
    def share_read(self) -> float:
        """Of the journal."""
        return self.position.bytes / max(1, self.position.bytes + self.unread)

    @property
    def reading(self) -> float | None:
        """The share that was read, where much was not: what is known is old."""
        return None if self.unread < _MUCH else self.share_read

    def advance(self, budget: float) -> bool:
        """Fold what has come for `budget` seconds at most; whether anything was."""
        unread = self.unread
        if unread < 0:
            raise JournalError(f"{self.folder / FILE_NAME}: shorter than it was")
        if unread == 0:
            return False
        deadline = time.monotonic() + budget
        first = self.position
        for count, (entry, after) in enumerate(follow(self.folder / FILE_NAME, self.position)):
            self._fold(entry)
            self.position = after
            if count % _STRIDE == 0 and time.monotonic() > deadline:
                break
        return self.position != first

    def catch_up(self, budget: float) -> bool:
        """As `advance`; from the beginning again where what was read has been taken back."""
        try:
            return self.advance(budget)
        except JournalError:
            if self.position == self._failed:
                raise  # it is damaged, and was read again for nothing
            self._failed = self.position
            self.begin()
            return True

    def forget_news(self) -> bool:
        """Where nobody is told; whether there was any."""
        news = self.lanes.news()
        found = bool(self.new_lines or news.changes or news.batches or news.marks)
        self.new_lines = []
        return found

    def _fold(self, entry: JournalEntry) -> None:
        event = entry.event
        if isinstance(event, JobStarted):
            self.began, self.status = entry.at, "running"
        self.heard = max(self.heard, entry.at)
        at = 0.0 if self.began is None else round(entry.at - self.began, 3)
        before = self.ledger.state
        commands = self.ledger.add(event, entry.at)
        after = self.ledger.state
        self.lanes.watch(before, event, after, commands, at)
        self.attempts.watch(before, event, after, at)
        self.tail.watch(self.ledger, event)
        self.samples.watch(event, self.position)
        self.mishaps.watch(before, event, after, at)
        self._watch(before, event, after, at)
        self._tell(event, commands, at)
        for command in commands:
            self._note(command)

    def _note(self, command: Command) -> None:
        match command:
            case FinishRun():
                self.status, self.error = command.status, command.error
            case RecordRolloutBatch(purpose="eval"):
                self.right_or_wrong &= all(reward in (0.0, 1.0) for reward in command.rewards)
            case _:
                pass

    def _watch(self, before: RunState, event: AnyEvent, after: RunState, at: float) -> None:
        match event:
            case DecodingReported() if after.decode_costs is not before.decode_costs:
                self.ways.add(event, at)
                self.pace.add(at, sum(tally.tokens for tally in event.tallies))
            case RolloutFinished() if not self.spec.speculation.arms:
                self.pace.add(at, event.length)
            case DrafterDeltaReady() if after.drafter_state is not before.drafter_state:
                self.losses.append(Loss(at, event.loss))
            case _:
                pass

    def _tell(self, event: AnyEvent, commands: Sequence[Command], at: float) -> None:
        for text in self.narrator.lines(event, commands):
            self._line += 1
            line = Line(self._line, at, text)
            self.lines.append(line)
            self.new_lines.append(line)


def read_spec(folder: Path) -> JobSpec:
    try:
        return msgspec.json.decode((folder / "spec.json").read_bytes(), type=JobSpec)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder}: there is no run") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder / 'spec.json'}: {error}") from error
