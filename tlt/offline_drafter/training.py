"""Train a drafter for a policy folder, so that an interrupted training can be continued.

The policy's answers and the learner's state are stored as the training goes; the policy's hidden
states are computed again. The drafter's folder appears only when it is complete.
"""

import math
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import torch

from tlt.models.decoder_from_folder import load_decoder
from tlt.models.decoder_spec import Decoder
from tlt.models.drafter_folder import load_drafter
from tlt.models.eagle_drafter import Drafter, DrafterConfig
from tlt.offline_drafter.resumable_training_files import TrainingFiles, TrainingPlan
from tlt.offline_drafter.training_data import TrainingData, gather
from tlt.spec.config import HOT_TOKENS
from tlt.trainer.drafter.accept_length import accept_lengths
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.initial_drafter import (
    choose_tokens,
    drafter_config_for,
    initialise_drafter,
    measure_input_sizes,
    require_drafter_fits,
)
from tlt.trainer.drafter.micro_batches import build_batch, shuffled_micro_batches
from tlt.trainer.drafter.samples import EmbeddingAndHead

_DEPTHS = (4, 6, 8)
_POINTS = 10
_CURVE = "curve.json"
# updates that a given drafter is assumed to have had: at the learning rates of a new drafter a
# good one would get worse at first
_PAST_UPDATES = 3000


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the learning curve."""

    tokens: int
    # wall seconds of training, those of interrupted processes included
    seconds: float
    # loss of the last micro-batch; None if it was not finite
    loss: float | None
    skipped: int
    # accept length by depth, for proposals drawn with the policy's noise and for the likeliest
    noise: dict[int, float]
    plain: dict[int, float]

    def describe_accept_lengths(self) -> str:
        best = max(self.noise, self.plain, key=lambda lengths: sum(lengths.values()))
        values = " / ".join(f"{length:.2f}" for length in best.values())
        return f"accept length {values} at depth {' / '.join(map(str, best))}"

    def describe(self, planned_tokens: int) -> str:
        loss = "no loss" if self.loss is None else f"loss {self.loss:.3f}"
        return (
            f"{self.tokens:,} of {planned_tokens:,} tokens, {self.seconds:.0f} s: "
            f"{loss}, {self.describe_accept_lengths()}"
        )


def train_drafter(
    plan: TrainingPlan,
    out: Path,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
    cores: int,
) -> list[CurvePoint] | None:
    """Return the learning curve, or None if `stopped` interrupted the training."""
    torch.set_num_threads(cores)
    policy = load_decoder(Path(plan.policy))
    start = None if plan.start is None else _load_start(plan.start, policy)
    config = _new_config(plan, policy) if start is None else start.config
    files = TrainingFiles(out, plan)
    data = gather(plan, policy, config, files, say, stopped)
    if data is None:
        return None
    ends = EmbeddingAndHead.of(policy, torch.float32, torch.device("cpu"))
    sizes = measure_input_sizes(config, ends.embedding, data.samples)
    drafter = start or initialise_drafter(config, sizes, plan.seed)
    if start is None:
        choose_tokens(drafter, ends.head, data.samples)
    hyperparameters = DrafterHyperparameters(past=0 if start is None else _PAST_UPDATES)
    learner = DrafterLearner(drafter, ends, hyperparameters, sizes)
    training = _Training(plan, learner, data, files)
    while not training.done:
        if stopped():
            training.save()
            return None
        training.train_micro_batch()
        if training.point_due:
            point = training.evaluate()
            training.save()
            say(point.describe(plan.tokens))
    files.finish(learner.drafter(), learner.updates, ends.head)
    return training.curve


def _new_config(plan: TrainingPlan, policy: Decoder) -> DrafterConfig:
    return drafter_config_for(policy.config, plan.layout, HOT_TOKENS)


def _load_start(folder: str, policy: Decoder) -> Drafter:
    drafter = load_drafter(Path(folder), policy.config.layers)
    require_drafter_fits(drafter, policy.config, folder)
    return drafter


class _Training:
    def __init__(
        self, plan: TrainingPlan, learner: DrafterLearner, data: TrainingData, files: TrainingFiles
    ) -> None:
        self._plan = plan
        self._data = data
        self._files = files
        self._learner = learner
        if (state := files.read_learner()) is not None:
            learner.load(state)
        self.curve = files.read(_CURVE, list[CurvePoint]) or []
        self._seconds = self.curve[-1].seconds if self.curve else 0.0
        self._windows = shuffled_micro_batches(
            data.samples, learner.hyperparameters.rows, plan.seed
        )
        past = islice(self._windows, learner.updates + learner.skipped)
        self._tokens = sum(window.rows for chosen in past for window in chosen)
        self._loss = float("nan")

    @property
    def done(self) -> bool:
        return self._tokens >= self._plan.tokens

    @property
    def point_due(self) -> bool:
        """Return True if the tokens have passed the next tenth of the plan."""
        last = self.curve[-1].tokens if self.curve else 0
        return self._tenths(self._tokens) > self._tenths(last)

    def train_micro_batch(self) -> None:
        began = time.monotonic()
        learner = self._learner
        steps, device = learner.hyperparameters.steps, learner.ends.head.device
        result = learner.learn(build_batch(self._data.samples, next(self._windows), steps, device))
        self._seconds += time.monotonic() - began
        self._tokens += result.rows
        self._loss = result.loss

    def evaluate(self) -> CurvePoint:
        learner = self._learner
        found = accept_lengths(learner.drafter(), learner.ends, self._data.held_out, _DEPTHS)
        point = CurvePoint(
            tokens=self._tokens,
            seconds=round(self._seconds, 2),
            loss=self._loss if math.isfinite(self._loss) else None,
            skipped=learner.skipped,
            noise=found.noise,
            plain=found.plain,
        )
        self.curve.append(point)
        return point

    def save(self) -> None:
        self._files.write(_CURVE, self.curve)
        self._files.write_learner(self._learner.state())

    def _tenths(self, tokens: int) -> int:
        return tokens * _POINTS // self._plan.tokens
