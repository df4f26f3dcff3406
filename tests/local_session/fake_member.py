"""A rank's drafter training: it counts the micro-batches that are in each delta, base and drafter.

A delta that is merged twice or to a base that lacks an earlier one is an error.
"""

import time

import msgspec

from tlt.base.id_types import Digest, DrafterVersion, PolicyVersion, PromptIndex, Step
from tlt.blobs.blob_files import Blobs
from tlt.errors import BlobError
from tlt.protocol.commands import MergeDrafter, OpenJob, TrainDrafter
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterTrainingStopped,
)
from tlt.protocol.rank_messages import RankSetup
from tlt.protocol.refs import AcceptedCounts, BlobRef, DrafterBase, DrafterDelta, DrafterRef
from tlt.protocol.shared_values import DrafterEvaluation, TokensByOrigin

_MICRO_BATCH_SECONDS = 0.002
# micro-batches of a delta
_UPDATES = 4
# time after which a member without answers to learn from leaves
_MOST_WAIT_SECONDS = 0.3
ARCHITECTURE = Digest("fake")
MemberEvent = DrafterDeltaReady | DrafterDiverged | DrafterMerged | DrafterTrainingStopped


class _Learned(msgspec.Struct, frozen=True):
    """Hold each member's micro-batches, in the blobs of bases and drafters."""

    members: dict[str, int]


class _Delta(msgspec.Struct, frozen=True):
    """Hold the member's micro-batches before a delta and with it, in the delta's blob."""

    before: int
    after: int


def accept_length(micro_batches: int) -> float:
    """Return the accept length of a drafter: it grows with what it has learned."""
    return 1.0 + 2.0 * micro_batches / (micro_batches + 64)


def accepted_counts(drafter: DrafterRef | None, tokens: int) -> tuple[AcceptedCounts, ...]:
    """Return the steps of an answer by the drafts that they accepted: none, or two."""
    if drafter is None:
        return ()
    length = accept_length(drafter.micro_batches)
    taken = min(round(tokens * (length - 1) / (2 * length)), tokens // 3)
    return (AcceptedCounts(drafter=drafter.version, steps=(tokens - 3 * taken, 0, taken)),)


class FakeMember:
    """The rank's training sessions, as `DrafterMember` has them."""

    def __init__(self, setup: RankSetup, opened: OpenJob, blobs: Blobs) -> None:
        self.used: DrafterRef | None = None
        self._setup = setup
        self._job = opened
        self._blobs = blobs
        self._session: TrainDrafter | None = None
        self._merge: MergeDrafter | None = None
        self._last_over = 0
        self._waits_since = 0.0
        # tokens to learn from, by origin
        self._tokens: dict[str, int] = {}
        self._held_out: set[tuple[Step, PromptIndex]] = set()
        # all micro-batches so far, those that the base has, and those in each delta's blob
        self._trained, self._merged, self._number = 0, 0, 0
        self._published: dict[int, int] = {}
        self._known = 0
        self._unpublished = 0
        self._root: DrafterVersion | None = None

    @property
    def name(self) -> str:
        return f"{self._setup.incarnation}.{self._setup.rank}"

    @property
    def is_training(self) -> bool:
        return self._session is not None

    @property
    def lacks_answers(self) -> bool:
        return not self._tokens

    def add_tokens(self, origin: str, tokens: int) -> None:
        self._tokens[origin] = self._tokens.get(origin, 0) + tokens

    def adopt(self, ref: DrafterRef | None) -> str | None:
        """Use a drafter, or return why that fails."""
        if ref is not None and (self.used is None or ref.version != self.used.version):
            if ref.architecture != ARCHITECTURE:
                return f"drafter version {ref.version} was made for another architecture"
            try:
                self._blobs.get(ref.weights)
            except BlobError as error:
                return f"drafter version {ref.version}: {error}"
        self.used = ref
        return None

    def begin(self, command: TrainDrafter) -> None:
        if command.training_session <= self._last_over:
            return
        if self._session is None:
            self._waits_since = time.monotonic()
        self._session = command
        self._move_to(command.base)
        if self._merge is not None and not self._can_merge(self._merge):
            self._merge = None

    def request_merge(self, command: MergeDrafter) -> None:
        if self._can_merge(command):
            self._merge = command

    def step(self, policy: PolicyVersion) -> list[MemberEvent]:
        """Do one piece of work: a merge, a publication or a micro-batch."""
        session = self._session
        assert session is not None
        try:
            if self._merge is not None:
                merge, self._merge = self._merge, None
                return [self._merged_event(merge, policy)]
            if self._unpublished >= _UPDATES:
                return [self._publish(session, policy)]
        except BlobError as error:
            self._session = None
            return [
                DrafterDiverged(
                    job=self._job.job,
                    worker=self._setup.worker,
                    incarnation=self._setup.incarnation,
                    training_session=session.training_session,
                    base=session.base.version,
                    error=str(error),
                )
            ]
        if self.lacks_answers:
            waited = time.monotonic() - self._waits_since
            return [] if waited <= _MOST_WAIT_SECONDS else self.stop(session.training_session)
        time.sleep(_MICRO_BATCH_SECONDS)
        self._trained += 1
        self._unpublished += 1
        return []

    def stop(self, training_session: int) -> list[MemberEvent]:
        """End a training session; what isn't published stays for the next one."""
        if self._session is not None and self._session.training_session == training_session:
            self._session = self._merge = None
        self._last_over = max(self._last_over, training_session)
        stopped = DrafterTrainingStopped(
            job=self._job.job,
            worker=self._setup.worker,
            incarnation=self._setup.incarnation,
            training_session=training_session,
            dropped_seconds=_MICRO_BATCH_SECONDS,
            median_seconds=_MICRO_BATCH_SECONDS,
        )
        return [stopped]

    def _move_to(self, base: DrafterBase) -> None:
        number, micro_batches = base.merged.get(self.name, (-1, 0))
        if self._root is not None and self._root != base.root:
            self._merged, self._unpublished = self._trained, 0
            self._published.clear()
        elif number in self._published:
            self._merged, self._known = self._published[number], micro_batches
        self._published = {n: t for n, t in self._published.items() if n > number}
        self._root = base.root

    def _can_merge(self, command: MergeDrafter) -> bool:
        session = self._session
        return (
            session is not None
            and session.training_session == command.training_session
            and session.base.version == command.base.version
        )

    def _publish(self, session: TrainDrafter, policy: PolicyVersion) -> DrafterDeltaReady:
        delta = _Delta(before=self._merged, after=self._trained)
        ref = DrafterDelta(
            worker=self._setup.worker,
            incarnation=self._setup.incarnation,
            rank=self._setup.rank,
            number=self._number,
            base=session.base.version,
            blob=self._put((self.name, self._number, delta)),
            micro_batches=delta.after - delta.before,
            previous_micro_batches=self._known,
        )
        self._published[self._number] = self._trained
        updates, self._unpublished = self._unpublished, 0
        self._number += 1
        return DrafterDeltaReady(
            job=self._job.job,
            training_session=session.training_session,
            policy=policy,
            delta=ref,
            updates=updates,
            tokens=TokensByOrigin(**self._tokens),
            seconds=updates * _MICRO_BATCH_SECONDS,
            reading_seconds=0.0,
            publishing_seconds=0.0001,
            median_seconds=_MICRO_BATCH_SECONDS,
            longest_seconds=_MICRO_BATCH_SECONDS,
            loss=1.0 / (1 + self._trained),
        )

    def _merged_event(self, command: MergeDrafter, policy: PolicyVersion) -> DrafterMerged:
        base = command.base
        members = {} if base.weights is None else self._read(base.weights)
        for ref in command.deltas:
            _, _, delta = msgspec.json.decode(
                self._blobs.get(ref.blob), type=tuple[str, int, _Delta]
            )
            if members.get(ref.member, 0) > delta.before:
                raise AssertionError(f"{ref.member}'s micro-batches are merged twice")
            members = {**members, ref.member: delta.after}
        learned = sum(ref.micro_batches for ref in command.deltas)
        micro_batches = base.micro_batches + learned
        weights = self._put((command.version, _Learned(members)))
        drafter = DrafterRef(
            version=command.version,
            weights=self._put(("drafter", command.version, _Learned(members))),
            policy=policy,
            architecture=ARCHITECTURE,
            updates=base.updates + learned,
            micro_batches=micro_batches,
        )
        newest = {ref.member: (ref.number, micro_batches) for ref in command.deltas}
        used = None if self.used is None else accept_length(self.used.micro_batches)
        return DrafterMerged(
            job=self._job.job,
            worker=self._setup.worker,
            incarnation=self._setup.incarnation,
            base=DrafterBase(
                version=command.version,
                root=base.root,
                weights=weights,
                updates=drafter.updates,
                micro_batches=micro_batches,
                merged={**base.merged, **newest},
            ),
            drafter=drafter,
            evaluation=DrafterEvaluation(
                accept_length_before=used, accept_length=accept_length(micro_batches), answers=4
            ),
            seconds=0.001,
        )

    def _put(self, content: object) -> BlobRef:
        return self._blobs.put(msgspec.json.encode(content), commit=False)

    def _read(self, ref: BlobRef) -> dict[str, int]:
        *_, learned = msgspec.json.decode(self._blobs.get(ref))
        return msgspec.convert(learned, _Learned).members
