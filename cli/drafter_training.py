"""A training is kept beside its drafter until it is done: whatever ends it, it can go on.

Kept is what is dear: the policy's answers and the learner's state. The policy's states are read
anew. Nothing lies where the drafter will be before it is whole.
"""

import math
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import torch

from cli.drafter_checkpoint import Notes
from cli.drafter_data import Material, gather
from cli.drafter_train_args import Plan
from tlt.models.decoder_spec import Decoder
from tlt.models.drafter_folder import load_drafter
from tlt.models.eagle_drafter import Drafter
from tlt.models.model_folder import load_decoder
from tlt.trainer.drafter.accept_length import accept_lengths
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.initial_drafter import (
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
# updates; with the rates of a start from nothing a good drafter would first get worse
_PAST = 3000


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Of the learning curve."""

    tokens: int
    # of computing, in this process and those that it goes on from
    seconds: float
    # None: of the last micro-batch there is none
    loss: float | None
    skipped: int
    # accept length by depth: guesses with the policy's noise, and the likeliest ones
    noise: dict[int, float]
    plain: dict[int, float]

    def told_loss(self) -> str:
        return "no loss" if self.loss is None else f"loss {self.loss:.3f}"

    def accept_lengths(self) -> str:
        best = max(self.noise, self.plain, key=lambda lengths: sum(lengths.values()))
        values = " / ".join(f"{length:.2f}" for length in best.values())
        return f"accept length {values} at depth {' / '.join(map(str, best))}"


def train_drafter(
    plan: Plan, out: Path, say: Callable[[str], None], stopped: Callable[[], bool]
) -> list[Point] | None:
    """The learning curve; nothing, if it was stopped before its end."""
    torch.set_num_threads(1)
    policy = load_decoder(Path(plan.policy))
    started = None if plan.start is None else _started(plan.start, policy)
    config = drafter_config_for(policy.config, plan.layout) if started is None else started.config
    notes = Notes(out, msgspec.to_builtins(plan))
    material = gather(plan, policy, config, notes, say, stopped)
    if material is None:
        return None
    ends = EmbeddingAndHead.of(policy, torch.float32, torch.device("cpu"))
    sizes = measure_input_sizes(config, ends.embedding, material.samples)
    drafter = started or initialise_drafter(config, sizes, plan.seed)
    hyperparameters = DrafterHyperparameters(past=0 if started is None else _PAST)
    learner = DrafterLearner(drafter, ends, hyperparameters, sizes)
    training = _Training(plan, learner, material, notes)
    while not training.done:
        if stopped():
            training.keep()
            return None
        training.learn()
        if training.due:
            point = training.measure()
            training.keep()
            say(
                f"{point.tokens:,} of {plan.tokens:,} tokens, {point.seconds:.0f} s: "
                f"{point.told_loss()}, {point.accept_lengths()}"
            )
    notes.finish(training.learner.drafter(), training.learner.updates)
    return training.curve


def _started(folder: str, policy: Decoder) -> Drafter:
    drafter = load_drafter(Path(folder), policy.config.layers)
    require_drafter_fits(drafter, policy.config, folder)
    return drafter


class _Training:
    def __init__(
        self, plan: Plan, learner: DrafterLearner, material: Material, notes: Notes
    ) -> None:
        self._plan = plan
        self._material = material
        self._notes = notes
        self.learner = learner
        if (state := notes.learner()) is not None:
            learner.load(state)
        self.curve = notes.read(_CURVE, list[Point]) or []
        self._seconds = self.curve[-1].seconds if self.curve else 0.0
        self._windows = shuffled_micro_batches(
            material.samples, learner.hyperparameters.rows, plan.seed
        )
        past = islice(self._windows, learner.updates + learner.skipped)
        self._tokens = sum(window.rows for chosen in past for window in chosen)
        self._loss = float("nan")

    @property
    def done(self) -> bool:
        return self._tokens >= self._plan.tokens

    @property
    def due(self) -> bool:
        """Whether the curve lacks a point."""
        last = self.curve[-1].tokens if self.curve else 0
        return self._mark(self._tokens) > self._mark(last)

    def learn(self) -> None:
        began = time.process_time()
        steps, device = self.learner.hyperparameters.steps, self.learner.ends.head.device
        chosen = build_batch(self._material.samples, next(self._windows), steps, device)
        training_session = self.learner.learn(chosen)
        self._seconds += time.process_time() - began
        self._tokens += training_session.rows
        self._loss = training_session.loss

    def measure(self) -> Point:
        drafter = self.learner.drafter()
        found = accept_lengths(drafter, self.learner.ends, self._material.held_out, _DEPTHS)
        point = Point(
            tokens=self._tokens,
            seconds=round(self._seconds, 2),
            loss=self._loss if math.isfinite(self._loss) else None,
            skipped=self.learner.skipped,
            noise=found.noise,
            plain=found.plain,
        )
        self.curve.append(point)
        return point

    def keep(self) -> None:
        self._notes.write(_CURVE, self.curve)
        self._notes.keep_learner(self.learner.state())

    def _mark(self, tokens: int) -> int:
        return tokens * _POINTS // self._plan.tokens
