"""Train the drafter of one member, a micro-batch at a time.

An interrupt ends a micro-batch as if it had never begun. What a member keeps between two training
sessions (optimiser moments, and work that is not merged yet) is lost with its rank, and no other
member needs it.
"""

import random
import time
from collections import deque
from statistics import median

from tlt.base.interrupt_check import CheckInterrupt
from tlt.engine.base import Engine
from tlt.errors import BlobError, ConfigError
from tlt.kernels.training_kernels import load_kernels
from tlt.protocol.refs import DrafterBase
from tlt.ranks.drafter.delta_base_reader import BaseReader
from tlt.ranks.drafter.delta_publisher import DeltaPublisher, MicroBatch
from tlt.ranks.drafter.drafter_factory import DrafterFactory
from tlt.ranks.drafter.merged_delta_tracker import DeltaTracker
from tlt.ranks.drafter.micro_batch_time_limit import MicroBatchSize, work_clock
from tlt.ranks.drafter.replay_buffer import Answer, ReplayBuffer
from tlt.ranks.rank_job_context import RankJob
from tlt.trainer.drafter.divergence_detector import DivergenceDetector
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.micro_batches import Window, build_batch

_DRAWS = 64
_REMEMBERED_SECONDS = 50


class DrafterTrainer:
    """The member's learner and its samples."""

    def __init__(
        self,
        job: RankJob,
        engine: Engine,
        factory: DrafterFactory,
        replay: ReplayBuffer,
        publisher: DeltaPublisher,
    ) -> None:
        self.size = MicroBatchSize(work_clock(factory.device))
        # None until the member first trains, and after its drafter has diverged
        self.tracker: DeltaTracker | None = None
        self._name = job.member
        self._members = 1
        self._engine = engine
        self._factory = factory
        self._replay = replay
        self._publisher = publisher
        self._bases = BaseReader(job.blobs())
        self._divergence = DivergenceDetector()
        setup = job.setup
        self._random = random.Random(f"{job.spec.seed} {setup.incarnation} {setup.rank}")
        self._durations: deque[float] = deque(maxlen=_REMEMBERED_SECONDS)
        self._dropped_seconds = 0.0
        load_kernels()  # otherwise the first micro-batch would wait for the build

    @property
    def median_seconds(self) -> float:
        """Return the median duration of the last micro-batches."""
        return median(self._durations) if self._durations else 0.0

    def take_dropped_seconds(self) -> float:
        """Return the seconds of work that was dropped since the last call."""
        dropped, self._dropped_seconds = self._dropped_seconds, 0.0
        return dropped

    def begin(self, base: DrafterBase, members: int) -> None:
        """Drop unpublished work if this base is of another lineage.

        `members` train at the same time, and their work is averaged.
        """
        self._members = members
        tracker = self.tracker
        if tracker is not None and tracker.base is not None and tracker.base.root != base.root:
            self._drop_unpublished()
            self._divergence = DivergenceDetector()

    def start_over(self) -> None:
        """Drop the learner, because it diverged or can't be merged."""
        self.tracker = None
        self._publisher.start_over()

    def draw(self) -> list[Answer]:
        """Return the answers of the next micro-batch; none if there are none."""
        return self._replay.draw(self.size.rows, [self._random.random() for _ in range(_DRAWS)])

    def train(self, base: DrafterBase, answers: list[Answer], check: CheckInterrupt) -> str | None:
        """Train on one micro-batch; return the reason if the drafter became void."""
        began = time.monotonic()
        try:
            if self.tracker is not None and base.weights is not None:
                # Prefills take long, and this base's blob is deleted when a newer base is merged.
                self.move_to(base, check)
            self.read(answers, check)
            return self._learn(self.move_to(base, check).learner, answers, check)
        except (BlobError, ConfigError):
            raise
        except Exception:
            self._dropped_seconds += time.monotonic() - began
            raise

    def read(self, answers: list[Answer], check: CheckInterrupt) -> None:
        """Load the hidden states of answers, by a prefill if they aren't on this host."""
        began = time.monotonic()
        for answer in answers:
            if not self._replay.fetch(answer):
                states = self._engine.compute_hidden_states(answer.tokens, check)
                self._replay.put_states(answer, states)
        self._publisher.add_reading(time.monotonic() - began)

    def move_to(self, base: DrafterBase, check: CheckInterrupt) -> DeltaTracker:
        """Continue the learner from this base."""
        tracker = self.tracker
        if tracker is not None and base == tracker.base:
            return tracker
        starts_over = tracker is not None and tracker.base is not None and base.weights is None
        if tracker is None or starts_over:
            samples = [answer.sample() for answer in self._replay.some_with_states()]
            tracker = DeltaTracker(self._name, self._factory.new_learner(samples, check))
            self.tracker = tracker
            self._divergence = DivergenceDetector()
        weights = self._bases.read(base, tracker.root, check)
        is_known = tracker.is_known(base)
        tracker.move_to(base, weights, check)
        if not is_known:
            self._drop_unpublished()
        return tracker

    def _learn(
        self, learner: DrafterLearner, answers: list[Answer], check: CheckInterrupt
    ) -> str | None:
        samples = [answer.sample() for answer in answers]
        windows = [Window(sample=i, first=0, last=s.rows) for i, s in enumerate(samples)]
        rows = self.size.rows
        if len(samples) == 1 and samples[0].rows > rows:
            last = self._random.randint(samples[0].first + 1, samples[0].rows)
            windows = [Window(sample=0, first=max(0, last - rows), last=last)]
        began = time.monotonic()
        hyperparameters = learner.hyperparameters
        with self.size.adapt(hyperparameters.past + learner.updates):
            steps = hyperparameters.steps
            batch = build_batch(samples, windows, steps, self._factory.device)
            result = learner.learn(batch, check, self._members)
        seconds = time.monotonic() - began
        self._durations.append(seconds)
        if result.skipped:
            self._dropped_seconds += seconds  # its loss may be NaN
        else:
            origins = (answer.candidate.origin for answer in answers)
            tokens = list(zip(origins, (window.rows for window in windows), strict=True))
            self._publisher.add(MicroBatch(seconds=seconds, loss=result.loss, tokens=tokens))
        self._divergence.record(result)
        return self._divergence.divergence()

    def _drop_unpublished(self) -> None:
        self._dropped_seconds += self._publisher.drop()
