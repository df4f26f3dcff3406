"""A rank's part in training the drafter: micro-batches that a command ends at any moment.

There is one drafter. A rank that trains is a member: what it adds to the trunk it hands in as
deltas, and somebody merges them. It never waits for another member. What it keeps between two
lessons (its moments, and what was not merged yet) dies with it and is missed by nobody.
"""

import random
import time
from collections import deque
from pathlib import Path
from statistics import median

import torch

from tlt.engine.native import NativeEngine
from tlt.errors import BlobError, ConfigError
from tlt.ids import NAMED
from tlt.interrupt import CheckInterrupt, never_interrupt
from tlt.kernels.training_kernels import load_kernels
from tlt.models.drafter_folder import read_update_count
from tlt.models.eagle_drafter import Drafter, architecture, new_drafter
from tlt.models.safetensors_io import put_weights, read_weights
from tlt.protocol.commands import MergeDrafter, TrainDrafter
from tlt.protocol.events import DrafterDeltaReady, DrafterDiverged, DrafterTrainingStopped
from tlt.protocol.rank_messages import FromRank
from tlt.protocol.records import TokensByOrigin
from tlt.protocol.refs import BlobRef, DrafterBase, DrafterDelta, DrafterRef
from tlt.ranks.delta_tracker import DeltaTracker
from tlt.ranks.drafter_merger import drafter_of, mean_of, measured, next_trunk, read_trunk, report
from tlt.ranks.engine_factory import drafter_config
from tlt.ranks.hidden_state_store import HiddenStateStore
from tlt.ranks.rank_job import RankJob
from tlt.ranks.replay_buffer import Answer, ReplayBuffer
from tlt.ranks.shared_memory_budget import SharedMemoryBudget
from tlt.trainer.drafter.delta_merging import BaseWeights
from tlt.trainer.drafter.divergence_detector import DivergenceDetector
from tlt.trainer.drafter.drafter_learner import DrafterLearner, MicroBatchResult
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.initial_drafter import initialise_drafter, measure_input_sizes
from tlt.trainer.drafter.micro_batches import Window, build_batch
from tlt.trainer.drafter.samples import EmbeddingAndHead

# a micro-batch should take so long: who calls waits for no more than a look, but drops it
_SECONDS = 0.06
_FIRST_ROWS, _LEAST_ROWS, _MOST_ROWS = 256, 32, 4096
# what is handed in: so many micro-batches, and of long ones so many seconds
_PUBLISH_UPDATES = 8
_PUBLISH_SECONDS, _LONG_SECONDS = 0.5, 4.0
# of what is handed in where a lesson ends; disks and checksums manage so many bytes a second
_DISMISSAL_SECONDS, _WRITTEN_A_SECOND = 0.05, 2e8
# of the time, at most
_PUBLISHING_SHARE = 0.05
# so often a look puts it off; then who calls waits for once, else it might never be done
_PUT_OFF = 8
_DRAWS = 64
# who finds nothing to learn from for so long leaves
_PATIENCE = 3.0
# updates that a drafter which somebody else trained has behind it
_TRAINED = 3000


class _Open:
    """What was learned since it was last handed in."""

    def __init__(self, publishing: float = 0.0) -> None:
        # what the last handing in took
        self.publishing = publishing
        # how often a look has put off the next, and what was done for it until then
        self.times_put_off = 0
        self.seconds_put_off = 0.0
        self.seconds: list[float] = []
        self.reading = 0.0
        self.loss = 0.0
        self.tokens: dict[str, int] = {}

    @property
    def updates(self) -> int:
        return len(self.seconds)

    def add(
        self,
        answers: list[Answer],
        windows: list[Window],
        training_session: MicroBatchResult,
        seconds: float,
    ) -> None:
        self.seconds.append(seconds)
        self.loss += training_session.loss
        for answer, window in zip(answers, windows, strict=True):
            origin = answer.candidate.origin
            self.tokens[origin] = self.tokens.get(origin, 0) + window.rows

    def put_off(self, seconds: float) -> None:
        self.times_put_off += 1
        self.seconds_put_off += seconds


class DrafterTrainer:
    def __init__(self, job: RankJob, engine: NativeEngine, named: Drafter | None) -> None:
        """`named`: the drafter that the spec names."""
        self._job = job
        self._engine = engine
        self._named = self._used = named
        self._config = drafter_config(job.spec, named)
        self._ends = EmbeddingAndHead(
            embedding=engine.embedding_and_head[0], head=engine.embedding_and_head[1]
        )
        with torch.device("meta"):
            parameters = list(new_drafter(self._config).parameters())
        # of a delta: the weights, and their mean
        self._bytes = 2 * sum(p.numel() for p in parameters) * self._ends.head.itemsize
        room = SharedMemoryBudget(engine, self._bytes)
        self._blobs = job.blobs(room.beside_drafters)
        states = job.flight / "states"
        shelf = HiddenStateStore(states, engine.token_state_example, room.beside_states)
        self.pool = ReplayBuffer(shelf, job.spec.drafter.megabytes << 20)
        self._dice = random.Random(f"{job.spec.seed} {job.setup.incarnation} {job.setup.rank}")
        self._school: TrainDrafter | None = None
        # what it was asked to merge, and has not merged yet
        self._asked: MergeDrafter | None = None
        self._member: DeltaTracker | None = None
        self._health = DivergenceDetector()
        self._number = 0
        self._rows = _FIRST_ROWS
        # who has to share a core learns as much by a micro-batch as who has it alone
        on_cpu = self._ends.head.device.type == "cpu"
        self._work_clock = time.thread_time if on_cpu else time.monotonic
        self._lately: deque[float] = deque(maxlen=50)
        self._dropped = 0.0
        self._open = _Open()
        # when there was something to learn from
        self._fed = 0.0
        # whether there was nothing to learn from lately
        self.hungry = False
        # the last lesson that this rank has said to be over
        self._over = 0
        # builds what a first micro-batch would have to wait for
        load_kernels()

    @property
    def active(self) -> bool:
        return self._school is not None

    # --- lessons

    def begin(self, school: TrainDrafter) -> None:
        if school.training_session <= self._over:
            return
        if self._school is None:
            self._fed = time.monotonic()
        self._school = school
        member, base = self._member, school.base
        if member is not None and member.ref is not None and member.ref.root != base.root:
            self._lose_open()  # the trunk it was of was given up
            self._health = DivergenceDetector()
        if self._asked is not None and not self._is_asked(self._asked):
            self._asked = None
        self.pool.begin(school.step)
        self.pool.hold_out(school.held_out)

    def step(self, check: CheckInterrupt) -> list[FromRank]:
        """One micro-batch, or a merge. What `look` raises ends it, and that micro-batch never was.

        A merge is begun again after that, and so is handing in.
        """
        school = self._school
        assert school is not None
        if self._asked is not None:
            return self._merge(school, self._asked, check)
        if self._is_due():
            return self._hand_in_late(school, check)
        began = time.monotonic()
        answers = self.pool.draw(self._rows, [self._dice.random() for _ in range(_DRAWS)])
        self.hungry = not answers
        if not answers:
            # others' answers may be on their way
            waited = began - self._fed
            return self.dismiss(school.training_session) if waited > _PATIENCE else []
        self._fed = began
        try:
            if self._member is not None and school.base.weights is not None:
                # before what may take long: others replace it, and nobody keeps it for this member
                self._on_trunk(school.base, check)
            self._read(answers, check)
            member = self._on_trunk(school.base, check)
            complaint = self._learn(member.learner, answers, check)
        except (BlobError, ConfigError) as error:
            return [self._spoiled(school, str(error))]
        except Exception:
            self._dropped += time.monotonic() - began
            raise
        if complaint is not None:
            return [self._spoiled(school, complaint)]
        return self._hand_in(school, member, check) if self._is_due() else []

    def dismiss(self, training_session: int) -> list[FromRank]:
        school, frames = self._school, list[FromRank]()
        if school is not None and school.training_session == training_session:
            if self._open.updates and self._member is not None and self._hands_in_at_once():
                frames += self._hand_in(school, self._member, never_interrupt)
            self._school = self._asked = None
        self._over = max(self._over, training_session)
        dropped, self._dropped = self._dropped, 0.0
        return [
            *frames,
            DrafterTrainingStopped(
                **self._job.reporter,
                training_session=training_session,
                dropped_seconds=dropped,
                typical_seconds=self._typical(),
            ),
        ]

    def _on_trunk(self, ref: DrafterBase, check: CheckInterrupt) -> DeltaTracker:
        member = self._member
        if member is not None and ref == member.ref:
            return member
        starts_over = member is not None and member.ref is not None and ref.weights is None
        if member is None or starts_over:
            member = self._member = DeltaTracker(self._job.member, self._new_learner())
            self._health = DivergenceDetector()
        device = self._ends.head.device
        if not member.stand_on(
            ref, read_trunk(self._blobs, ref, member.root, device, check), check
        ):
            self._lose_open()
        return member

    def _new_learner(self) -> DrafterLearner:
        samples = [answer.sample() for answer in self.pool.known()]
        sizes = measure_input_sizes(self._config, self._ends.embedding, samples)
        if self._named is None:
            drafter, past = initialise_drafter(self._config, sizes, self._job.spec.seed), 0
        else:
            drafter, past = new_drafter(self._config), self._updates_of_named()
            drafter.load_state_dict(self._named.state_dict())
        drafter = drafter.to(self._ends.head).requires_grad_(True)
        return DrafterLearner(drafter, self._ends, DrafterHyperparameters(past=past), sizes)

    def _updates_of_named(self) -> int:
        assert self._job.spec.drafter.path is not None
        known = read_update_count(Path(self._job.spec.drafter.path))
        return _TRAINED if known is None else min(known, _TRAINED)

    def _read(self, answers: list[Answer], check: CheckInterrupt) -> None:
        began = time.monotonic()
        for answer in answers:
            if not self.pool.fetch(answer):
                self.pool.read(answer, self._engine.compute_hidden_states(answer.tokens, check))
        self._open.reading += time.monotonic() - began

    def _learn(
        self, learner: DrafterLearner, answers: list[Answer], check: CheckInterrupt
    ) -> str | None:
        """And what is wrong with the drafter, if something is."""
        samples = [answer.sample() for answer in answers]
        windows = [Window(sample=i, first=0, last=s.rows) for i, s in enumerate(samples)]
        if len(samples) == 1 and samples[0].rows > self._rows:
            last = self._dice.randint(samples[0].first + 1, samples[0].rows)
            windows = [Window(sample=0, first=max(0, last - self._rows), last=last)]
        steps = learner.hyperparameters.steps
        began, worked = time.monotonic(), self._work_clock()
        try:
            training_session = learner.learn(
                build_batch(samples, windows, steps, self._ends.head.device), check
            )
        except Exception:
            self._shorten(self._work_clock() - worked)
            raise
        seconds = time.monotonic() - began
        self._lately.append(seconds)
        self._resize(0.5 * (self._rows + self._wanted(self._work_clock() - worked)))
        if training_session.skipped:
            self._dropped += seconds  # its loss may be no number at all
        else:
            self._open.add(answers, windows, training_session, seconds)
        self._health.record(training_session)
        return self._health.divergence()

    def _shorten(self, seconds: float) -> None:
        """After one that was not finished in them: else long ones might never be."""
        self._resize(min(self._rows, self._wanted(seconds)))

    def _wanted(self, seconds: float) -> float:
        return self._rows * _SECONDS / max(seconds, 1e-4)

    def _resize(self, rows: float) -> None:
        self._rows = round(min(max(rows, _LEAST_ROWS), _MOST_ROWS))

    def _typical(self) -> float:
        return median(self._lately) if self._lately else 0.0

    # --- handing in

    def _is_due(self) -> bool:
        taken = sum(self._open.seconds) + self._open.reading
        least = max(_PUBLISH_SECONDS, self._open.publishing / _PUBLISHING_SHARE)
        enough = self._open.updates >= _PUBLISH_UPDATES or taken >= _LONG_SECONDS
        return self._open.updates > 0 and enough and taken >= least

    def _hands_in_at_once(self) -> bool:
        """Who has called does not wait for a large drafter to be written: it is kept for later."""
        expected = max(self._open.publishing, self._bytes / _WRITTEN_A_SECOND)
        return expected <= _DISMISSAL_SECONDS

    def _hand_in_late(self, school: TrainDrafter, check: CheckInterrupt) -> list[FromRank]:
        """A look has put it off: it goes before other work."""
        began, late = time.monotonic(), self._open
        if late.times_put_off >= _PUT_OFF:
            check = never_interrupt
        try:
            member = self._on_trunk(school.base, check)
        except (BlobError, ConfigError) as error:
            return [self._spoiled(school, str(error))]
        except Exception:
            late.put_off(time.monotonic() - began)
            raise
        # unless it stands on another trunk, without it
        return self._hand_in(school, member, check) if self._is_due() else []

    def _hand_in(
        self, school: TrainDrafter, member: DeltaTracker, check: CheckInterrupt
    ) -> list[FromRank]:
        """What `look` raises puts it off."""
        began, number, done = time.monotonic(), self._number, self._open
        assert member.ref is not None
        try:
            check()
            added = member.hand_in(number, check)
            check()
            blob = put_weights(self._blobs, added.tensors, commit=False, check=check)
        except BlobError as error:
            return [self._spoiled(school, str(error))]
        except Exception:
            done.put_off(time.monotonic() - began)
            raise
        self._number += 1
        publishing = time.monotonic() - began
        self._open = _Open(publishing)
        return [
            DrafterDeltaReady(
                job=self._job.id,
                training_session=school.training_session,
                policy=self._engine.version,
                delta=DrafterDelta(
                    worker=self._job.setup.worker,
                    incarnation=self._job.setup.incarnation,
                    rank=self._job.setup.rank,
                    number=number,
                    base=member.ref.version,
                    blob=blob,
                    micro_batches=added.micro_batches,
                    known=added.known,
                ),
                updates=done.updates,
                tokens=TokensByOrigin(**done.tokens),
                seconds=sum(done.seconds),
                reading_seconds=done.reading,
                publishing_seconds=done.seconds_put_off + publishing,
                typical_seconds=self._typical(),
                longest_seconds=max(done.seconds),
                loss=done.loss / done.updates,
            )
        ]

    def _lose_open(self) -> None:
        self._dropped += sum(self._open.seconds)
        self._open = _Open(self._open.publishing)

    def _spoiled(self, school: TrainDrafter, error: str) -> DrafterDiverged:
        """What this member holds is no use to anybody."""
        self._school = self._asked = self._member = None
        self._open = _Open()
        return DrafterDiverged(
            **self._job.reporter,
            training_session=school.training_session,
            base=school.base.version,
            error=error,
        )

    # --- the drafter as others made it

    def ask(self, command: MergeDrafter) -> None:
        if self._is_asked(command):
            self._asked = command

    def _is_asked(self, command: MergeDrafter) -> bool:
        """Else its lesson is over, or its trunk was given up: somebody will be asked again."""
        if self._school is None:
            return False
        return (
            self._school.training_session == command.training_session
            and self._school.base.version == command.base.version
        )

    def _merge(
        self, school: TrainDrafter, command: MergeDrafter, check: CheckInterrupt
    ) -> list[FromRank]:
        began = time.monotonic()
        try:
            answers = self.pool.canaries()
            self._read(answers, check)
            if self._member is None and answers:
                self._on_trunk(school.base, check)
            root = None if self._member is None else self._member.root
            base = next_trunk(self._blobs, command, root, self._ends.head.device, check)
            trained = drafter_of(mean_of(base), self._config, self._ends, self._named)
            evaluation = measured(trained, self._used, self._ends, answers, self._rows, check)
            check()
            own = put_weights(self._blobs, trained.state_dict(), commit=False, check=check)
            blob = self._put_trunk(base, check, beside=own, before=command.base.weights)
        except (BlobError, ConfigError) as error:
            return [self._spoiled(school, str(error))]
        self._asked = None
        drafter = DrafterRef(
            version=command.version,
            weights=own,
            policy=self._engine.version,
            architecture=architecture(self._config),
            updates=base.updates,
            micro_batches=base.micro_batches,
        )
        seconds = time.monotonic() - began
        return [report(self._job, command, base, blob, drafter, evaluation, seconds)]

    def _put_trunk(
        self, base: BaseWeights, check: CheckInterrupt, *, beside: BlobRef, before: BlobRef | None
    ) -> BlobRef:
        try:
            return put_weights(self._blobs, base.tensors, commit=False, check=check)
        except Exception:
            if beside != before:  # what is in use may be of the same bytes
                self._blobs.release(beside)  # nobody will hear of it
            raise

    def adopt(self, ref: DrafterRef | None) -> str | None:
        """Or why not."""
        if ref is None:
            if self._named is not None:
                self._engine.speculation.adopt_drafter(NAMED, self._named)
            elif self._engine.speculation.drafter_version is not None:
                self._engine.speculation.drop_drafter()
            self._used = self._named
            return None
        if ref.version == self._engine.speculation.drafter_version:
            return None
        name = f"drafter version {ref.version}"
        if ref.architecture != architecture(self._config):
            return f"{name} was made for another architecture"
        try:
            weights = read_weights(self._blobs, ref.weights)
            drafter = drafter_of(weights, self._config, self._ends, self._named)
            self._engine.speculation.adopt_drafter(ref.version, drafter)
        except (BlobError, ConfigError) as error:
            return f"{name}: {error}"
        self._used = drafter
        return None
