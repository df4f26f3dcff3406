"""Train a drafter for the tiny reasoner from scratch; measure accept length over CPU seconds.

`python -m benchmarks.drafter --out F.json`

It trains on the policy's answers to training prompts and is evaluated on held-out ones, all at
temperature 1. Accept length is replayed: proposals that share the policy's noise are accepted while
they equal what the policy drew. Seconds are CPU seconds of updates in one thread. Decoding the
answers, which a job's rollouts do anyway, is reported and not counted; evaluations aren't either.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch
from torch.nn import functional

from benchmarks.result import Claim, write_result
from tlt.base.id_types import Member, PolicyVersion, PromptIndex, Purpose, Step
from tlt.data.dataset import read_rows
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.decoder_spec import Decoder
from tlt.models.tokenizer import Tokenizer
from tlt.ranks.drafter.samples_from_engine import answered, rollout
from tlt.spec.config import JobSpec
from tlt.spec.spec_files import load_job_spec
from tlt.trainer.drafter.accept_length import AcceptLengths, PolicyRollout, accept_lengths
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.initial_drafter import (
    drafter_config_for,
    initialise_drafter,
    measure_input_sizes,
)
from tlt.trainer.drafter.micro_batches import (
    DrafterBatch,
    Window,
    build_batch,
    shuffled_micro_batches,
)
from tlt.trainer.drafter.samples import DrafterSample, EmbeddingAndHead, state_layers

_SPEC = Path(__file__).resolve().parent.parent / "configs" / "tiny-reasoner.yaml"
_BARS = {4: 3.6, 6: 4.4, 8: 5.0}
_FASTEST = 8000.0
_LEARNED, _HELD_OUT = 480, 64
_COUNTED = 60.0
_CURVE = (5.0, 10.0, 20.0, 30.0, 45.0, _COUNTED, 90.0, 120.0)
# compares the layouts
_SEEDS, _EACH = (1, 2, 3), 15.0
_ROUNDS, _BATCHES = 3, 20
_CPU = torch.device("cpu")
_Layout = Literal["eagle", "eagle3"]


class _Answers:
    """Answers with the hidden states that both layouts read."""

    def __init__(self, spec: JobSpec, policy: Decoder) -> None:
        config = drafter_config_for(policy.config, "eagle3")
        self._layers = state_layers(config, policy.config.layers)
        self._spec = spec
        self._policy = policy
        began = time.process_time()
        self._learned = list(self._generate(spec.data.sources[0].path, "train", _LEARNED))
        self.seconds = time.process_time() - began
        self._held_out = list(self._generate(str(spec.data.eval), "eval", _HELD_OUT))

    def samples(self, layout: _Layout) -> list[DrafterSample]:
        return [_for_layout(found.sample, layout) for found in self._learned]

    def held_out(self, layout: _Layout) -> list[PolicyRollout]:
        return [replace(f, sample=_for_layout(f.sample, layout)) for f in self._held_out]

    def _generate(self, file: str, purpose: Purpose, count: int) -> Iterator[PolicyRollout]:
        spec, tokenizer = self._spec, Tokenizer(self._spec.policy.path)
        engine = NativeEngine(
            self._policy,
            decode_text=tokenizer.decode,
            slots=32,
            max_context=spec.policy.max_context or self._policy.config.max_positions,
            device=_CPU,
            version=PolicyVersion(0),
            captured=self._layers,
        )
        requests = {
            index: Request(
                id=index,
                prompt=tokenizer.prompt_tokens(row[spec.data.prompt_key], spec.data, place),
                key=NoiseKey(
                    seed=spec.seed,
                    step=Step(0),
                    purpose=purpose,
                    prompt=PromptIndex(index),
                    member=Member(0),
                ),
                sampling=Sampling(),
                max_new_tokens=spec.rollout.max_new_tokens,
                stop_tokens=tokenizer.stop_tokens(),
            )
            for index, (place, row) in enumerate(islice(read_rows(Path(file)), count))
        }
        for text, states in answered(engine, requests.values()):
            yield rollout(text, states, requests[text.id].key, self._policy.config.vocabulary)
        engine.close()


def _for_layout(found: DrafterSample, layout: _Layout) -> DrafterSample:
    return found if layout == "eagle3" else replace(found, states=found.states[:, -1:].contiguous())


class _Training:
    """CPU seconds of updates and the accept lengths that they reached."""

    def __init__(
        self, policy: Decoder, samples: Sequence[DrafterSample], layout: _Layout, seed: int
    ) -> None:
        config = drafter_config_for(policy.config, layout)
        ends = EmbeddingAndHead.of(policy, torch.float32, _CPU)
        sizes = measure_input_sizes(config, ends.embedding, samples)
        drafter = initialise_drafter(config, sizes, seed)
        self.learner = DrafterLearner(drafter, ends, DrafterHyperparameters(), sizes)
        self.seconds, self.rows = 0.0, 0
        self._samples = samples
        self._windows = shuffled_micro_batches(samples, self.learner.hyperparameters.rows, seed)

    def train_until(self, seconds: float) -> None:
        while self.seconds < seconds:
            began = time.process_time()
            steps = self.learner.hyperparameters.steps
            chosen = build_batch(self._samples, next(self._windows), steps, _CPU)
            self.rows += self.learner.learn(chosen).rows
            self.seconds += time.process_time() - began

    def gain(self, held_out: Sequence[PolicyRollout]) -> AcceptLengths:
        return accept_lengths(self.learner.drafter(), self.learner.ends, held_out, tuple(_BARS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    spec = load_job_spec(_SPEC)
    policy = load_decoder(Path(spec.policy.path))
    answers = _Answers(spec, policy)
    learned, held_out = answers.samples("eagle"), answers.held_out("eagle")
    tokens = sum(sample.rows for sample in learned)
    training = _Training(policy, learned, "eagle", seed=0)
    curve: dict[float, AcceptLengths] = {}
    speed = 0.0
    for seconds in _CURVE:
        training.train_until(seconds)
        curve[seconds] = training.gain(held_out)
        if seconds == _COUNTED:
            speed = training.rows / training.seconds
    claims = [
        Claim(
            name=f"speculation.accept_length.depth{depth}",
            value=curve[_COUNTED].noise[depth],
            unit="tokens",
            bar=bar,
        )
        for depth, bar in _BARS.items()
    ]
    claims.append(
        Claim(name="drafter.training.tokens_per_second", value=speed, unit="tokens/s", bar=_FASTEST)
    )
    details: dict[str, Any] = {
        "answers_to_learn_from": len(learned),
        "tokens_to_learn_from": tokens,
        "cpu_seconds_of_decoding_them": round(answers.seconds, 1),
        "held_out_answers": len(held_out),
        "recipe": training.learner.hyperparameters,
        "accept_length_by_cpu_seconds": {s: _round_lengths(gain) for s, gain in curve.items()},
        "layouts": {
            "cpu_seconds": _EACH,
            "seeds": _SEEDS,
            **{layout: _layout(policy, answers, layout) for layout in ("eagle", "eagle3")},
        },
        "packing": _packing(policy, learned),
    }
    write_result("drafter", claims, details, time.monotonic() - began, arguments.out)


def _layout(policy: Decoder, answers: _Answers, layout: _Layout) -> dict[str, Any]:
    samples, held_out = answers.samples(layout), answers.held_out(layout)
    gains: list[AcceptLengths] = []
    speeds: list[float] = []
    for seed in _SEEDS:
        training = _Training(policy, samples, layout, seed)
        training.train_until(_EACH)
        gains.append(training.gain(held_out))
        speeds.append(training.rows / training.seconds)
    return {
        "captured_bytes_a_token": samples[0].states[0].nbytes,
        "tokens_per_second": round(mean(speeds)),
        "accept_length": [_round_lengths(gain) for gain in gains],
    }


def _packing(policy: Decoder, samples: Sequence[DrafterSample]) -> dict[str, Any]:
    """Measure tokens per second of the same trainer on three kinds of batches in turns."""
    learner = _Training(policy, samples, "eagle", seed=0).learner
    rows, steps = learner.hyperparameters.rows, learner.hyperparameters.steps
    packings = {
        "packed": (
            build_batch(samples, chosen, steps, _CPU)
            for chosen in shuffled_micro_batches(samples, rows, seed=0)
        ),
        "padded": _padded(samples, rows, steps, similar=False),
        "padded_among_similar_lengths": _padded(samples, rows, steps, similar=True),
    }
    rates: dict[str, list[float]] = {packing: [] for packing in packings}
    for _ in range(_ROUNDS):
        for packing, batches in packings.items():
            chosen = list(islice(batches, _BATCHES))
            began = time.process_time()
            for made in chosen:
                learner.learn(made)
            tokens = sum(int(made.measurable[0].sum()) for made in chosen)
            rates[packing].append(tokens / (time.process_time() - began))
    best = {packing: round(median(found)) for packing, found in rates.items()}
    return {
        "answer_tokens_per_second": best,
        "gain": {
            packing: round(best["packed"] / rate, 2)
            for packing, rate in best.items()
            if packing != "packed"
        },
    }


def _padded(
    samples: Sequence[DrafterSample], budget: int, steps: int, similar: bool
) -> Iterator[DrafterBatch]:
    """Make padded batches of as many samples as fit."""
    dice = random.Random(0)
    while True:
        order = dice.sample(list(samples), len(samples))
        if similar:
            order.sort(key=lambda sample: sample.rows)
        buckets: list[list[DrafterSample]] = [[]]
        for found in order:
            bucket = buckets[-1]
            if max(other.rows for other in [*bucket, found]) * (len(bucket) + 1) > budget:
                buckets.append(bucket := [])
            bucket.append(found)
        for bucket in dice.sample(buckets, len(buckets)):
            yield _rectangle(bucket, steps)


def _rectangle(bucket: Sequence[DrafterSample], steps: int) -> DrafterBatch:
    longest = max(found.rows for found in bucket)
    filled = [_filled(found, longest - found.rows) for found in bucket]
    whole = [Window(sample=i, first=0, last=longest) for i in range(len(bucket))]
    made = build_batch(filled, whole, steps, _CPU)
    ends = torch.tensor([found.rows for found in bucket]).repeat_interleave(longest)
    reached = made.positions[0] + torch.arange(steps)[:, None]
    return replace(made, measurable=made.measurable & (reached < ends))


def _filled(found: DrafterSample, missing: int) -> DrafterSample:
    return replace(
        found,
        tokens=[*found.tokens, *[0] * missing],
        states=functional.pad(found.states, (0, 0, 0, 0, 0, missing)),
    )


def _round_lengths(gain: AcceptLengths) -> dict[str, dict[int, float]]:
    return {
        kind: {depth: round(length, 3) for depth, length in lengths.items()}
        for kind, lengths in (("with_noise", gain.noise), ("likeliest", gain.plain))
    }


if __name__ == "__main__":
    main()
