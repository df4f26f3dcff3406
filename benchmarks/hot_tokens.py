"""Measure what a drafter gains that proposes some tokens of a large vocabulary only.

`python -m benchmarks.hot_tokens --out F.json`

SmolLM2-135M goes on with short questions for 96 tokens. Two drafters learn from the same
micro-batches in turns, one with all 49,152 rows of the policy's head and one with those of the
default; then both propose for the same requests in turns. Seconds are CPU seconds of one thread;
accept lengths are of drafters that have only just begun to learn.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.result import Claim, write_result
from examples.smollm2.prepare import prepare
from tlt.base.id_types import DrafterVersion, Member, PolicyVersion, PromptIndex, Step
from tlt.base.strategies import Draft
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.decoder_spec import Decoder
from tlt.models.tokenizer import Tokenizer
from tlt.ranks.drafter.samples_from_engine import Text, answered, sample
from tlt.spec.config import HOT_TOKENS
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.initial_drafter import (
    choose_tokens,
    drafter_config_for,
    initialise_drafter,
    measure_input_sizes,
)
from tlt.trainer.drafter.micro_batches import build_batch, shuffled_micro_batches
from tlt.trainer.drafter.samples import DrafterSample, EmbeddingAndHead

_ANSWERS, _TOKENS, _CONTEXT = 64, 96, 128
_ROUNDS, _MICRO_BATCHES = 3, 3
_DECODED, _DEPTH = 4, 4
_FASTER_TRAINING, _FASTER_DECODING = 3.0, 1.1
_CPU = torch.device("cpu")
_KINDS: dict[str, int | None] = {"whole head": None, "hot tokens": HOT_TOKENS}


class _Drafters:
    """A drafter of each kind in training, on the same micro-batches."""

    def __init__(self, policy: Decoder, samples: Sequence[DrafterSample]) -> None:
        self._samples = samples
        self._learners = {kind: _learner(policy, samples, n) for kind, n in _KINDS.items()}
        self._windows = shuffled_micro_batches(samples, DrafterHyperparameters().rows, seed=0)

    def train(self) -> dict[str, float]:
        """Return answer tokens per CPU second of some micro-batches."""
        steps = DrafterHyperparameters().steps
        batches = [
            build_batch(self._samples, next(self._windows), steps, _CPU)
            for _ in range(_MICRO_BATCHES)
        ]
        tokens = sum(int(batch.measurable[0].sum()) for batch in batches)
        rates: dict[str, float] = {}
        for kind, learner in self._learners.items():
            began = time.process_time()
            for batch in batches:
                learner.learn(batch)
            rates[kind] = tokens / (time.process_time() - began)
        return rates

    def adopt(self, engine: NativeEngine, kind: str) -> None:
        drafter = self._learners[kind].drafter()
        engine.adopt_drafter(DrafterVersion(list(_KINDS).index(kind)), drafter)

    def coverage(self, texts: Sequence[Text]) -> float:
        """Return the share of the answers' tokens that the restricted drafter can propose."""
        tokens = self._learners["hot tokens"].drafter().tokens
        assert tokens is not None
        drawn = torch.tensor([token for text in texts for token in text.tokens[text.prompt :]])
        return torch.isin(drawn, tokens).double().mean().item()


def _learner(
    policy: Decoder, samples: Sequence[DrafterSample], hot_tokens: int | None
) -> DrafterLearner:
    config = drafter_config_for(policy.config, "eagle", hot_tokens)
    ends = EmbeddingAndHead.of(policy, torch.float32, _CPU)
    sizes = measure_input_sizes(config, ends.embedding, samples)
    drafter = initialise_drafter(config, sizes, seed=0)
    choose_tokens(drafter, ends.head, samples)
    return DrafterLearner(drafter, ends, DrafterHyperparameters(), sizes)


def _requests(tokenizer: Tokenizer, count: int, seed: int) -> Iterator[Request]:
    """Yield questions whose answers all have the same length, as no token ends them."""
    dice = random.Random(seed)
    for index in range(count):
        first, second = dice.randrange(10, 100), dice.randrange(10, 100)
        yield Request(
            id=index,
            prompt=tokenizer.answer_tokens(f"What is {first} + {second}? Explain each step."),
            key=NoiseKey(
                seed=seed,
                step=Step(0),
                purpose="train",
                prompt=PromptIndex(index),
                member=Member(0),
            ),
            sampling=Sampling(),
            max_new_tokens=_TOKENS,
            stop_tokens=frozenset(),
        )


def _decode(engine: NativeEngine, requests: Sequence[Request]) -> tuple[float, float]:
    """Return CPU seconds per token, and the accept length."""
    began = time.process_time()
    engine.submit(requests)
    done = [answer for _ in iter(lambda: engine.running, 0) for answer in engine.step()]
    seconds = time.process_time() - began
    tokens = sum(len(answer.tokens) for answer in done)
    accepted = sum(
        span.tokens for answer in done for span in answer.origins if span.origin == "accepted"
    )
    return seconds / tokens, tokens / (tokens - accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    folder = arguments.policy or prepare(print)
    tokenizer, policy = Tokenizer(str(folder)), load_decoder(folder)
    engine = NativeEngine(
        *(policy, tokenizer.decode, _ANSWERS, _CONTEXT, _CPU, PolicyVersion(0)),
        captured=(policy.config.layers,),
        arms=(Draft(depth=_DEPTH),),
    )
    pairs = list(answered(engine, _requests(tokenizer, _ANSWERS, seed=0)))
    drafters = _Drafters(policy, [sample(text, states) for text, states in pairs[::2]])
    trained = [drafters.train() for _ in range(1 + _ROUNDS)][1:]
    engine.speculation.set_strategy(Draft(depth=_DEPTH))
    decoded: list[dict[str, tuple[float, float]]] = []
    for seed in range(1, 1 + _ROUNDS):
        requests = list(_requests(tokenizer, _DECODED, seed))
        decoded.append({})
        for kind in _KINDS:
            drafters.adopt(engine, kind)
            decoded[-1][kind] = _decode(engine, requests)
    rates = {kind: median(found[kind] for found in trained) for kind in _KINDS}
    seconds = {kind: median(found[kind][0] for found in decoded) for kind in _KINDS}
    claims = [
        Claim(
            name="hot_tokens.training",
            value=round(rates["hot tokens"] / rates["whole head"], 2),
            unit="times the answer tokens a second",
            bar=_FASTER_TRAINING,
        ),
        Claim(
            name="hot_tokens.decoding",
            value=round(seconds["whole head"] / seconds["hot tokens"], 2),
            unit="times the tokens a second",
            bar=_FASTER_DECODING,
        ),
    ]
    details: dict[str, Any] = {
        "vocabulary": policy.config.vocabulary,
        "hot_tokens": HOT_TOKENS,
        "share_of_other_answers_tokens_that_are_hot": round(
            drafters.coverage([text for text, _ in pairs[1::2]]), 3
        ),
        "training_answer_tokens_per_second": {k: round(rate, 1) for k, rate in rates.items()},
        "decoding": {
            "rows": _DECODED,
            "depth": _DEPTH,
            "milliseconds_per_token": {k: round(1e3 * found, 1) for k, found in seconds.items()},
            "accept_length": {
                kind: [round(found[kind][1], 2) for found in decoded] for kind in _KINDS
            },
        },
    }
    write_result("hot_tokens", claims, details, time.monotonic() - began, arguments.out)


if __name__ == "__main__":
    main()
