"""Workloads that nothing was tuned for: policies of many shapes, their prompts and their drafters.

A random policy never stops, so the lengths of its answers are imposed. The scale of its logits
decides how well its answers can be guessed: small ones make all tokens alike, large ones make it
repeat itself.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import torch

from tlt.base.id_types import Member, PolicyVersion, PromptIndex, Step
from tlt.data.dataset import read_rows
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.decoder_spec import HEAD, Decoder, DecoderConfig, weight_shapes
from tlt.models.eagle_drafter import Drafter
from tlt.models.rope import PlainRope
from tlt.models.tokenizer import Tokenizer
from tlt.ranks.drafter.samples_from_engine import answered, sample
from tlt.spec.spec_files import load_job_spec
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.initial_drafter import (
    drafter_config_for,
    initialise_drafter,
    measure_input_sizes,
)
from tlt.trainer.drafter.micro_batches import build_batch, shuffled_micro_batches
from tlt.trainer.drafter.samples import EmbeddingAndHead, state_layers

Lengths = Callable[[random.Random], int]

_EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_CPU = torch.device("cpu")
_GROUP = 8
_PROMPT_TOKENS = (8, 40)
_MOST_PROMPTS = 256
_HEAD_DIM = 32
_POSITIONS = 1024
_WEIGHT_SPREAD = 0.08
# answers that a drafter is trained on
_ANSWERS = 96


@dataclass(frozen=True, kw_only=True)
class RandomPolicy:
    family: Literal["llama", "qwen2", "qwen3"] = "llama"
    layers: int
    hidden: int
    vocabulary: int
    # standard deviation of the logits
    logits: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A policy, its requests and its drafter, and the number of rows that decode at once."""

    # or the folder of an example with a spec
    policy: RandomPolicy | Path
    rows: int
    # of the answers; policies of examples stop by themselves
    lengths: Lengths = field(default=lambda dice: _POSITIONS)
    # CPU seconds of drafter training; 0 leaves random weights, None means that there is no drafter
    drafter: float | None = None
    # factors of the logits, which change with the weights from one block to the next
    sharpness: Sequence[float] = (1.0,)


def between(low: int, high: int) -> Lengths:
    return lambda dice: dice.randint(low, high)


def always(length: int) -> Lengths:
    return lambda dice: length


def log_normal(median: float, spread: float, most: int) -> Lengths:
    return lambda dice: max(4, min(most, round(median * dice.lognormvariate(0.0, spread))))


def two_lengths(short: int, long: int, share_of_long: float) -> Lengths:
    return lambda dice: long if dice.random() < share_of_long else short


WORKLOADS = {
    # 8 layers of width 64 and short answers, which little can be guessed of
    "shallow": Workload(
        policy=RandomPolicy(layers=8, hidden=64, vocabulary=20, logits=2.0),
        rows=16,
        lengths=between(10, 60),
        drafter=8.0,
    ),
    "two-layers": Workload(
        policy=RandomPolicy(family="qwen2", layers=2, hidden=64, vocabulary=50, logits=1.5),
        rows=64,
        lengths=between(16, 48),
    ),
    "nothing-to-guess": Workload(
        policy=RandomPolicy(layers=12, hidden=128, vocabulary=5000, logits=0.5),
        rows=16,
        lengths=log_normal(80, 0.6, 400),
        drafter=0.0,
    ),
    "one-row": Workload(
        policy=RandomPolicy(family="qwen3", layers=16, hidden=128, vocabulary=1000, logits=2.5),
        rows=1,
        lengths=always(120),
        drafter=8.0,
    ),
    "equal-lengths": Workload(
        policy=RandomPolicy(family="qwen2", layers=8, hidden=256, vocabulary=2000, logits=3.0),
        rows=32,
        lengths=always(96),
    ),
    "wide": Workload(
        policy=RandomPolicy(layers=6, hidden=512, vocabulary=4000, logits=2.5),
        rows=8,
        lengths=two_lengths(40, 200, 0.2),
        drafter=8.0,
    ),
    "large-vocabulary": Workload(
        policy=RandomPolicy(family="qwen3", layers=4, hidden=128, vocabulary=150_000, logits=3.0),
        rows=4,
        lengths=log_normal(40, 0.5, 160),
    ),
    "deep": Workload(
        policy=RandomPolicy(family="qwen3", layers=48, hidden=64, vocabulary=100, logits=3.0),
        rows=8,
        lengths=log_normal(90, 0.8, 700),
        drafter=10.0,
    ),
    "bimodal": Workload(
        policy=RandomPolicy(family="qwen2", layers=24, hidden=128, vocabulary=300, logits=3.5),
        rows=32,
        lengths=two_lengths(20, 260, 0.15),
        drafter=10.0,
    ),
    # what could be guessed can't be guessed any more, and then can again
    "collapse": Workload(
        policy=RandomPolicy(layers=16, hidden=64, vocabulary=100, logits=5.0),
        rows=8,
        lengths=log_normal(90, 0.6, 500),
        drafter=8.0,
        sharpness=(1.0, 1.0, 0.1, 0.1, 1.0, 0.1),
    ),
    "tail": Workload(
        policy=RandomPolicy(layers=20, hidden=96, vocabulary=64, logits=5.0),
        rows=64,
        lengths=log_normal(60, 1.0, 900),
    ),
    "brief-sums": Workload(policy=_EXAMPLES / "brief_sums", rows=32, drafter=20.0),
}


class Requests:
    """An endless series of requests, group by group as in a job."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        self._stops: frozenset[int] = frozenset()
        self._prompts: list[tuple[int, ...]] = []
        if isinstance(workload.policy, Path):
            spec = load_job_spec(workload.policy / "job.yaml")
            tokenizer = Tokenizer(spec.policy.path)
            self._stops = tokenizer.stop_tokens()
            for place, row in islice(read_rows(Path(spec.data.sources[0].path)), _MOST_PROMPTS):
                prompt = tokenizer.prompt_tokens(row[spec.data.prompt_key], spec.data, place)
                self._prompts.append(tuple(prompt))

    def block(self, number: int, count: int) -> list[Request]:
        """Return the requests of a block, the same ones at every call."""
        dice = random.Random(f"{self._seed} {number}")
        prompts = [self._prompt(dice) for _ in range(0, count, _GROUP)]
        return [
            Request(
                id=index,
                prompt=prompts[index // _GROUP],
                key=NoiseKey(
                    seed=self._seed,
                    step=Step(number),
                    purpose="train",
                    prompt=PromptIndex(index // _GROUP),
                    member=Member(index % _GROUP),
                ),
                sampling=Sampling(),
                max_new_tokens=min(
                    self._workload.lengths(dice),
                    _POSITIONS - len(prompts[index // _GROUP]),
                ),
                stop_tokens=self._stops,
            )
            for index in range(count)
        ]

    def _prompt(self, dice: random.Random) -> tuple[int, ...]:
        if self._prompts:
            return dice.choice(self._prompts)
        policy = self._workload.policy
        assert isinstance(policy, RandomPolicy)
        tokens = dice.randint(*_PROMPT_TOKENS)
        return tuple(dice.randrange(policy.vocabulary) for _ in range(tokens))


def make_policy(workload: Workload, seed: int) -> Decoder:
    policy = workload.policy
    if isinstance(policy, Path):
        return load_decoder(Path(load_job_spec(policy / "job.yaml").policy.path))
    config = DecoderConfig(
        vocabulary=policy.vocabulary,
        hidden=policy.hidden,
        intermediate=2 * policy.hidden,
        layers=policy.layers,
        heads=max(2, policy.hidden // _HEAD_DIM),
        kv_heads=max(1, policy.hidden // _HEAD_DIM // 2),
        head_dim=_HEAD_DIM,
        norm_eps=1e-6,
        rope=PlainRope(theta=10_000.0),
        max_positions=_POSITIONS,
        tied=False,
        qkv_bias=policy.family == "qwen2",
        out_bias=False,
        mlp_bias=False,
        head_norms=policy.family == "qwen3",
    )
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in weight_shapes(config).items():
        if "norm" in name:
            weights[name] = torch.ones(shape)
            continue
        spread = policy.logits * policy.hidden**-0.5 if name == HEAD else _WEIGHT_SPREAD
        weights[name] = torch.empty(shape).normal_(0.0, spread, generator=generator)
    return Decoder(config=config, weights=weights)


def sharpened(policy: Decoder, factor: float) -> dict[str, torch.Tensor]:
    """Return the policy's weights with logits that are larger by a factor."""
    return {name: w * factor if name == HEAD else w for name, w in policy.weights.items()}


def captured_layers(policy: Decoder) -> tuple[int, ...]:
    """Return the layers whose states a job that trains a drafter keeps by default."""
    return state_layers(drafter_config_for(policy.config, "eagle"), policy.config.layers)


def make_drafter(workload: Workload, policy: Decoder, requests: Requests, seed: int) -> Drafter:
    """Train a drafter on the policy's answers for the workload's CPU seconds."""
    engine = NativeEngine(
        policy,
        decode_text=lambda tokens: "",
        slots=16,
        max_context=_POSITIONS,
        device=_CPU,
        version=PolicyVersion(0),
        captured=captured_layers(policy),
    )
    samples = [sample(*each) for each in answered(engine, requests.block(1_000_000, _ANSWERS))]
    engine.close()
    config = drafter_config_for(policy.config, "eagle")
    ends = EmbeddingAndHead.of(policy, torch.float32, _CPU)
    sizes = measure_input_sizes(config, ends.embedding, samples)
    drafter = initialise_drafter(config, sizes, seed)
    learner = DrafterLearner(drafter, ends, DrafterHyperparameters(), sizes)
    windows = shuffled_micro_batches(samples, learner.hyperparameters.rows, seed)
    end = time.process_time() + (workload.drafter or 0.0)
    while time.process_time() < end:
        batch = build_batch(samples, next(windows), learner.hyperparameters.steps, _CPU)
        learner.learn(batch)
    return learner.drafter()
