"""Route a worker's messages: commands and peers' answers to its ranks, their events to the outbox.

Commands reach the ranks as they are. Messages about another job than the open one are dropped, and
so are commands to another incarnation.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, assert_never

import msgspec
import structlog

from tlt.actors.blobs_between_hosts import referenced_blobs
from tlt.actors.run_until_one_fails import IncarnationEnded
from tlt.actors.worker.drafter_training import DrafterTraining
from tlt.actors.worker.event_outbox import Outbox
from tlt.actors.worker.partial_answers_to_learn_from import PartialAnswerExchange
from tlt.actors.worker.peer_answers import follow_peers
from tlt.actors.worker.policy_update_reports import PolicyUpdate
from tlt.actors.worker.prompt_intake import PromptIntake
from tlt.actors.worker.worker_context import IncarnationSetup, WorkerSetup
from tlt.base.json_logs import serve_runs
from tlt.base.strategies import Ngram
from tlt.errors import StoreError
from tlt.protocol.commands import (
    AdoptDrafter,
    CloseJob,
    CutAnswers,
    MergeDrafter,
    OpenJob,
    PauseJob,
    ReplaceRanks,
    StartRollout,
    StopDrafterTraining,
    TrainDrafter,
    UpdatePolicy,
    WorkerCommand,
)
from tlt.protocol.events import (
    CheckpointCommitted,
    DecodingReported,
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
    PolicyPublished,
    PolicyUpdateFinished,
    RankEvent,
    RolloutCut,
    RolloutFinished,
    SizesChosen,
    WorkerFailed,
)
from tlt.protocol.rank_messages import PartialAnswers, PeerAnswer, RankReady, TurnFinished
from tlt.store.message_codec import Codec, Fields
from tlt.store.redis_connection import CONNECTION_ERRORS
from tlt.store.redis_stream import add_dead_letter, read_pages

# a command ends the read at once
COMMAND_BLOCK_MS = 10_000
# in which a rank ends its decode step and writes what its answers have
_CUT_SECONDS = 10.0
_commands = Codec[WorkerCommand](WorkerCommand)
_log = structlog.get_logger("worker")


class MessageRouter:
    """The parts of a worker, and the messages that each of them gets."""

    def __init__(self, worker: WorkerSetup, setup: IncarnationSetup, outbox: Outbox) -> None:
        self.job: OpenJob | None = None
        # True once this incarnation has produced an answer or an update
        self.productive = False
        # True from a cut of the answers until the next rollout batch
        self._is_cutting = False
        self.training = DrafterTraining(setup)
        self._worker = worker
        self._setup = setup
        self._outbox = outbox
        self._intake = PromptIntake(setup, outbox)
        self._update = PolicyUpdate(setup)
        self._partial_answers = PartialAnswerExchange(setup, self.training)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return the tasks that run as long as the incarnation."""
        return [
            self._follow_commands(),
            self._intake.conversations.run(),
            self._intake.pull(),
            self._intake.wake(),
            self._follow_peers(),
            self._partial_answers.request(),
            self._partial_answers.fetch(),
            *(self._listen(index) for index in range(len(self._setup.ranks))),
        ]

    async def end(self) -> None:
        """Close the connections of the tasks."""
        await self._intake.end()

    def busy_ranks(self) -> set[int]:
        """Return the ranks that have work."""
        ranks = range(len(self._setup.ranks))
        if self._update.running:
            return set(ranks)
        return self._intake.busy_ranks | {r for r in ranks if self.training.is_training(r)}

    # --- commands

    async def _follow_commands(self) -> None:
        setup = self._setup
        key = setup.keys.commands(setup.worker, setup.incarnation)
        pages = read_pages(setup.connection, key, after="0", count=10, block_ms=COMMAND_BLOCK_MS)
        async for page in pages:
            for id_, fields in page:
                command = await _read(setup, key, fields)
                if command is not None and _concerns(command, setup, self.job):
                    if self.job is not None:
                        await self._worker.blobs.fetch(
                            self.job.job, Path(self.job.folder), referenced_blobs(command)
                        )
                    await self._obey(command)
                with contextlib.suppress(*CONNECTION_ERRORS):
                    await setup.connection.xdel(key, id_)

    async def _obey(self, command: WorkerCommand) -> None:
        match command:
            case OpenJob():
                self._open(command)
            case CloseJob():
                self._close(command)
            case StartRollout():
                self._is_cutting = False
                self._setup.send(command)
                self._partial_answers.start_rollout(command)
                self._intake.start(command)
            case CutAnswers():
                self._intake.stop()
                self._setup.send(command)
                self._is_cutting = True
            case TrainDrafter():
                self._intake.stop()
                self.training.begin(command)
                if self.training.session is command:
                    self._partial_answers.stop_sharing()
            case StopDrafterTraining():
                self.training.stop(command)
            case MergeDrafter():
                self._setup.ranks[0].send(command)
            case AdoptDrafter():
                self._setup.send(command)
            case UpdatePolicy():
                if not self._update.is_repeated(command):
                    self._intake.stop()
                    self._update.begin(command)
            case ReplaceRanks():
                # ranks that still load answer nothing soon
                if self._is_cutting and any(rank.progress()[1] for rank in self._setup.ranks):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._intake.answered.wait(), _CUT_SECONDS)
                raise IncarnationEnded(command.reason)
            case _:
                assert_never(command)

    def _open(self, command: OpenJob) -> None:
        if command == self.job:
            return  # the command was repeated: the job is open already
        serve_runs([Path(command.folder)])
        _log.info("job opened", job=command.job, incarnation=command.incarnation)
        self.job = command
        self._outbox.open(command.job, Path(command.folder))
        self._intake.open(command)
        self._setup.send(command)
        self.training.open(command)
        self._partial_answers.open(command)

    def _close(self, command: CloseJob) -> None:
        if self._update.running:
            raise IncarnationEnded("the job ended during an update")
        _log.info("job closed", job=command.job)
        serve_runs([])
        self.job = None
        self._intake.close()
        self.training.close()
        self._partial_answers.close()
        self._setup.send(command)

    # --- messages of the ranks and of other workers

    async def _listen(self, rank: int) -> None:
        while True:
            message = await self._setup.ranks[rank].receive()
            if isinstance(message, RankReady):
                raise IncarnationEnded("a rank reported twice that it is ready")
            if self.job is None or self.job.job != message.job:
                continue
            if isinstance(message, TurnFinished):
                self._intake.conversations.note_turn(message)
            elif isinstance(message, PartialAnswers):
                await self._partial_answers.publish(message)
            else:
                self._pass_on(rank, message)

    def _pass_on(self, rank: int, event: RankEvent) -> None:
        match event:
            case SizesChosen():
                self._intake.add_slots(event)
                self._outbox.post(event)
            case RolloutFinished():
                taken = self._intake.finish(event) if event.stop != "cancelled" else None
                if taken is not None:
                    self.productive = True
                    if waited := self._intake.conversations.take_tool_seconds():
                        event = msgspec.structs.replace(event, tool_seconds=waited)
                    self._outbox.post(event, taken)
                    self._share(event, written_by=taken.rank)
            case RolloutCut():
                if (cut := self._intake.finish(event)) is not None:
                    self._outbox.post(event, cut)
            case DrafterTrainingStopped():
                stopped = self.training.note_stopped(rank, event)
                if stopped is not None:
                    self._outbox.post(stopped)
            case CheckpointCommitted() | PolicyPublished() | PolicyUpdateFinished():
                if (collected := self._update.collect(event)) is not None:
                    self.productive = True
                    for each in collected:
                        self._outbox.post(each)
            case (
                DecodingReported()
                | DrafterDeltaReady()
                | DrafterDiverged()
                | DrafterMerged()
                | DrafterRefused()
                | PauseJob()
                | WorkerFailed()
            ):
                self._outbox.post(event)
            case _:
                assert_never(event)

    async def _follow_peers(self) -> None:
        async for event in follow_peers(self._outbox.events, self._worker.session.workers):
            if event.worker == self._setup.worker:
                continue
            if isinstance(event, RolloutFinished):
                self._share(event, written_by=None)
            else:
                self._partial_answers.note_idle_worker(event)

    def _share(self, rollout: RolloutFinished, written_by: int | None) -> None:
        """Send an answer to the ranks that may use it for proposals or training."""
        if self.job is None or rollout.job != self.job.job:
            return
        spec = self.job.spec
        proposes = any(isinstance(arm, Ngram) for arm in spec.speculation.arms)
        if not proposes and spec.drafter.train == "off":
            return
        answer = PeerAnswer(
            job=rollout.job,
            step=rollout.step,
            purpose=rollout.purpose,
            prompt=rollout.prompt,
            member=rollout.member,
            answer=rollout.answer,
        )
        for index, rank in self._setup.engines(spec.rollout).items():
            if index != written_by:
                rank.send(answer)


def _concerns(command: WorkerCommand, setup: IncarnationSetup, open_job: OpenJob | None) -> bool:
    """Return False for a command to another incarnation, or about a job that isn't open."""
    if (command.worker, command.incarnation) != (setup.worker, setup.incarnation):
        return False
    if isinstance(command, OpenJob | ReplaceRanks):
        return True
    return open_job is not None and open_job.job == command.job


async def _read(setup: IncarnationSetup, key: str, fields: Fields) -> WorkerCommand | None:
    """Return None for what can't be read, and put it to the dead letters."""
    try:
        return _commands.decode(fields)
    except StoreError as error:
        _log.error("dead letter", key=key, error=str(error))
        with contextlib.suppress(*CONNECTION_ERRORS):
            async with setup.connection.pipeline(transaction=True) as transaction:
                letters = setup.keys.dead_letters
                add_dead_letter(transaction, letters, key, fields, str(error))
                await transaction.execute()
        return None
