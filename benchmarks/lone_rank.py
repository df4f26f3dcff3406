"""Run a rank by itself, as its worker would: one process on one device, and one job."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, TypeVar

from tlt.actors.worker.rank_process import RankProcess
from tlt.base.id_types import (
    Attempt,
    DrafterVersion,
    Epoch,
    Incarnation,
    JobId,
    Member,
    PolicyVersion,
    PromptIndex,
    Step,
    WorkerId,
)
from tlt.protocol.commands import (
    AdoptDrafter,
    CloseJob,
    MergeDrafter,
    OpenJob,
    PromptIssued,
    StopDrafterTraining,
    TrainDrafter,
    UpdatePolicy,
)
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
    PolicyUpdateFinished,
    RolloutFinished,
    WorkerFailed,
)
from tlt.protocol.rank_messages import (
    DecodePrompts,
    FromRank,
    PartialAnswers,
    RankSetup,
    SharePartialAnswers,
)
from tlt.protocol.refs import (
    DrafterBase,
    DrafterDelta,
    DrafterRef,
    MinibatchShare,
    SampleRef,
)
from tlt.spec.config import JobSpec

_WORKER, _INCARNATION, _EPOCH, _STEP = WorkerId("worker-1"), Incarnation(1), Epoch(1), Step(0)
_FIRST = DrafterVersion(0)
NEW_DRAFTER = DrafterBase(version=_FIRST, root=_FIRST, weights=None, updates=0, micro_batches=0)
_READY_SECONDS = 120.0

Kind = TypeVar("Kind")


class _Address(TypedDict):
    worker: WorkerId
    incarnation: Incarnation
    job: JobId


class LoneRank:
    def __init__(self, process: RankProcess, job: JobId) -> None:
        self._process = process
        self._job = job
        self._address = _Address(worker=_WORKER, incarnation=_INCARNATION, job=job)
        self._version = PolicyVersion(0)

    @classmethod
    async def start(cls, folder: Path, spec: JobSpec, device: str, job: str) -> "LoneRank":
        """Start a rank that keeps its files in `folder`, and open the job."""
        setup = RankSetup(
            worker=_WORKER,
            incarnation=_INCARNATION,
            rank=0,
            device=device,
            host="127.0.0.1",
            flight=str(folder / "flight"),
        )
        process = await RankProcess.start(setup, cores=frozenset(), logs=folder / "logs")
        await process.wait_ready(_READY_SECONDS)
        rank = cls(process, JobId(job))
        process.send(
            OpenJob(
                **rank._address,
                epoch=_EPOCH,
                spec=spec,
                folder=str(folder / "run"),
            )
        )
        await rank.settle()
        return rank

    async def settle(self) -> None:
        """Wait until the rank has done what it was commanded, by a question that it answers."""
        self._process.send(SharePartialAnswers(job=self._job))
        await self._wait_for(PartialAnswers)

    async def adopt_drafter(self, drafter: DrafterRef) -> None:
        """Swap drafters, and wait until that is done; raise if the rank refuses."""
        self._process.send(AdoptDrafter(**self._address, drafter=drafter))
        await self.settle()

    async def decode(self, prompts: Sequence[Sequence[int]], members: int) -> list[RolloutFinished]:
        """Decode some answers to each prompt."""
        issued = [
            PromptIssued(
                job=self._job,
                epoch=_EPOCH,
                step=_STEP,
                attempt=Attempt(0),
                purpose="train",
                prompt=PromptIndex(index),
                member=Member(member),
                tokens=tuple(prompt),
            )
            for index, prompt in enumerate(prompts)
            for member in range(members)
        ]
        self._process.send(DecodePrompts(job=self._job, prompts=tuple(issued)))
        done: list[RolloutFinished] = []
        while len(done) < len(issued):
            done += self._only(RolloutFinished, await self._receive())
        return done

    def train_drafter(
        self,
        session: int,
        base: DrafterBase = NEW_DRAFTER,
        held_out: Sequence[int] = (),
    ) -> None:
        """Begin a training session; answers to the `held_out` prompts evaluate drafters."""
        self._process.send(
            TrainDrafter(
                **self._address,
                step=_STEP,
                training_session=session,
                base=base,
                held_out={_STEP: tuple(map(PromptIndex, held_out))},
            )
        )

    async def next_delta(self) -> DrafterDeltaReady:
        return await self._wait_for(DrafterDeltaReady)

    async def merge_drafter(
        self, session: int, deltas: Sequence[DrafterDelta], base: DrafterBase = NEW_DRAFTER
    ) -> DrafterMerged:
        """Merge deltas into the next version of the drafter, and evaluate it."""
        self._process.send(
            MergeDrafter(
                **self._address,
                step=_STEP,
                training_session=session,
                version=DrafterVersion(base.version + 1),
                base=base,
                deltas=tuple(deltas),
            )
        )
        return await self._wait_for(DrafterMerged)

    async def stop_training(
        self, session: int
    ) -> tuple[DrafterTrainingStopped, list[DrafterDeltaReady]]:
        """Stop a training session; return what was published since, too."""
        self._process.send(StopDrafterTraining(**self._address, training_session=session))
        deltas: list[DrafterDeltaReady] = []
        while True:
            message = await self._receive()
            if isinstance(message, DrafterTrainingStopped):
                return message, deltas
            deltas += self._only(DrafterDeltaReady, message)

    async def update_policy(self, answers: Sequence[RolloutFinished]) -> PolicyUpdateFinished:
        """Learn from all answers at once; their advantages are 1 and -1 in turns."""
        refs = tuple(
            SampleRef(
                prompt=answer.prompt,
                member=answer.member,
                reward=0.5 + 0.5 * (-1.0) ** index,
                advantage=(-1.0) ** index,
                answer=answer.answer,
            )
            for index, answer in enumerate(answers)
        )
        share = MinibatchShare(
            ranks=(refs,),
            total_tokens=sum(answer.length for answer in answers),
            total_sequences=len(answers),
        )
        self._process.send(
            UpdatePolicy(
                **self._address,
                epoch=_EPOCH,
                step=_STEP,
                attempt=Attempt(0),
                version=self._version,
                rendezvous=self._process.rendezvous,
                group=f"update-{self._version}",
                world=1,
                first_rank=0,
                restore=None,
                sync_from=None,
                minibatches=(share,),
                checkpoint=False,
            )
        )
        self._version = PolicyVersion(self._version + 1)
        return await self._wait_for(PolicyUpdateFinished)

    def close(self) -> None:
        """Close the job, and end the process."""
        self._process.send(CloseJob(**self._address))
        self._process.kill()

    async def _wait_for(self, kind: type[Kind]) -> Kind:
        while True:
            if found := self._only(kind, await self._receive()):
                return found[0]

    async def _receive(self) -> FromRank:
        message = await self._process.receive()
        if isinstance(message, WorkerFailed | DrafterRefused):
            raise RuntimeError(message.error)
        return message

    def _only(self, kind: type[Kind], message: FromRank) -> list[Kind]:
        return [message] if isinstance(message, kind) else []
