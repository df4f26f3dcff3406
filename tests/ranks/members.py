"""Members of drafter training that run in the test's own process."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.ranks.ranks import INCARNATION, WORKER, local_rank, open_job, with_policy
from tests.samples import JOB, prompt
from tlt.base.id_types import DrafterVersion, Step
from tlt.base.interrupt_check import Interrupted, never_interrupt
from tlt.engine.native import NativeEngine
from tlt.protocol.commands import MergeDrafter, TrainDrafter
from tlt.protocol.events import DrafterDeltaReady, DrafterMerged
from tlt.protocol.rank_messages import DecodePrompts
from tlt.protocol.refs import DrafterBase
from tlt.ranks.drafter.delta_publisher import MicroBatch
from tlt.ranks.drafter.member import DrafterMember, MemberEvent
from tlt.ranks.main import Decoding, Rank
from tlt.spec.config import DrafterSpec, JobSpec, RolloutSpec, SpeculationSpec

Kind = TypeVar("Kind")
FIRST, SECOND = DrafterVersion(0), DrafterVersion(1)
NEW = DrafterBase(version=FIRST, root=FIRST, weights=None, updates=0, micro_batches=0)
# a base of another lineage
OTHER = DrafterBase(version=SECOND, root=SECOND, weights=None, updates=0, micro_batches=0)
_TRAINED = DrafterSpec(train="always")
LONG_MICRO_BATCH = MicroBatch(seconds=10.0, loss=1.0, tokens=[("own", 5)])


def interrupt() -> None:
    raise Interrupted


def member_spec(folder: Path, most_tokens: int = 100, drafter: DrafterSpec = _TRAINED) -> JobSpec:
    """Return a job that trains a drafter, with a tiny policy in the folder."""
    return with_policy(
        folder,
        rollout=RolloutSpec(max_new_tokens=most_tokens, slots=4),
        speculation=SpeculationSpec(mode="adaptive"),
        drafter=drafter,
    )


@contextmanager
def member_ranks(folder: Path, drafter: DrafterSpec = _TRAINED) -> Generator[tuple[Rank, Rank]]:
    """Yield two ranks of one worker, each with four answers to learn from."""
    spec = member_spec(folder, drafter=drafter)
    with local_rank(folder, 0) as one, local_rank(folder, 1) as other:
        for index, local in enumerate((one, other)):
            local.rank.handle(open_job(folder, spec))
            decode(local.rank, 7 + index)
        yield one.rank, other.rank


def decode(rank: Rank, index: int) -> None:
    """Decode four answers to a prompt."""
    rank.handle(DecodePrompts(job=JOB, prompts=tuple(prompt(index, member=m) for m in range(4))))
    while engine_of(rank).running:
        decoding_of(rank).rollout.step()


def decoding_of(rank: Rank) -> Decoding:
    assert rank.duties is not None
    assert rank.duties.decoding is not None
    return rank.duties.decoding


def member_of(rank: Rank) -> DrafterMember:
    member = decoding_of(rank).member
    assert member is not None
    return member


def engine_of(rank: Rank) -> NativeEngine:
    engine = decoding_of(rank).engine
    assert isinstance(engine, NativeEngine)
    return engine


def train(base: DrafterBase, session: int = 1) -> TrainDrafter:
    return TrainDrafter(
        worker=WORKER,
        incarnation=INCARNATION,
        job=JOB,
        step=Step(0),
        training_session=session,
        base=base,
    )


def merge(base: DrafterBase, version: int, *published: DrafterDeltaReady) -> MergeDrafter:
    return MergeDrafter(
        worker=WORKER,
        incarnation=INCARNATION,
        job=JOB,
        step=Step(0),
        training_session=1,
        version=DrafterVersion(version),
        base=base,
        deltas=tuple(event.delta for event in published),
    )


def publish(member: DrafterMember, base: DrafterBase) -> DrafterDeltaReady:
    """Learn two micro-batches on this base, and publish them."""
    member.begin(train(base))
    events = [*member.step(never_interrupt), *member.step(never_interrupt)]
    return only(events, DrafterDeltaReady) if events else publish_now(member)


def publish_now(member: DrafterMember) -> DrafterDeltaReady:
    """Publish what the member has learned, whether that is due or not."""
    tracker = member.trainer.tracker
    assert tracker is not None
    return member.publisher.publish(tracker, 1, FIRST, 0.1, never_interrupt)  # type: ignore[arg-type]


def merged(member: DrafterMember, command: MergeDrafter) -> DrafterMerged:
    """Let the member merge, and return the result."""
    member.request_merge(command)
    return only(member.step(never_interrupt), DrafterMerged)


def only(events: Sequence[MemberEvent], kind: type[Kind]) -> Kind:
    """Return the only event, and assert its kind."""
    (found,) = events
    assert isinstance(found, kind)
    return found
