"""Check that speculation changes no token of whole answers.

`python -m benchmarks.lossless --out F.json`

The tiny reasoner answers held-out prompts in groups of 16 at temperature 1, 64 rows at once, in one
thread. A share of the answers is decoded with each fixed strategy; for the others a strategy is
drawn before each step, and now and then a good or a useless drafter is swapped in. All are compared
with the same answers decoded without speculation. Where two logits tie in float32, the gap between
them in a float64 pass of Transformers is reported. A second check draws second tokens, accepted or
corrected, from a random policy and tests their distribution.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.engine import MODEL
from benchmarks.result import Claim, write_result
from benchmarks.speculating import ARMS, DRAFTER, Requests, engine
from benchmarks.speculation import name_of
from tests.engine import drafter_models
from tests.engine.chi_square import p_value
from tests.engine.reference import (
    answers,
    forced_logits,
    gap_at_the_fork,
    logprobs_of,
    new_request,
    random_prompts,
)
from tests.engine.test_speculation import ARMS as TOY_ARMS
from tests.engine.test_speculation import engine as toy_engine
from tests.engine.test_speculation import second_tokens
from tlt.base.id_types import DrafterVersion
from tlt.base.strategies import Off, Strategy
from tlt.engine.base import Completion, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.drafter_folder import load_drafter
from tlt.models.eagle_drafter import Drafter, new_drafter

_SEQUENCES, _SEQUENCES_IN_DOUBLE = 5_000, 500
# share of the answers whose strategy changes at random
_SWITCHING = 0.4
_SWAPPED = 0.02
_ROWS = 64
_LONGEST = 256
_TIE, _LOGPROB = 1e-4, 1e-4
# answers whose log-probs are compared with a teacher-forced pass
_FORCED = 200
# enough to show a total variation of 0.02; ten tests together fail once in a hundred runs
_DRAWS, _CHANCE = 50_000, 0.001


class Part(NamedTuple):
    name: str
    strategy: Strategy | None
    requests: Sequence[Request]


class Comparison(NamedTuple):
    share: float
    parts: dict[str, dict[str, int]]
    gaps: list[float]
    off_logprobs: float
    tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sequences", type=int, default=_SEQUENCES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    single = _compare(torch.float32, arguments.sequences)
    double = _compare(torch.float64, arguments.sequences * _SEQUENCES_IN_DOUBLE // _SEQUENCES)
    less: dict[str, Any] = {"unit": "", "less_is_better": True}
    chances = _p_values()
    widest = max(single.gaps, default=0.0)
    claims = [
        Claim(name="speculation.identical_share", value=single.share, unit="", bar=0.999),
        Claim(name="speculation.identical_share.float64", value=double.share, unit="", bar=1),
        Claim(name="speculation.widest_tie", value=widest, bar=_TIE, **less),
        Claim(name="speculation.logprobs_off", value=single.off_logprobs, bar=_LOGPROB, **less),
        Claim(name="speculation.least_chance", value=min(chances.values()), unit="", bar=_CHANCE),
    ]
    details = {
        "float32": single._asdict(),
        "float64": double._asdict(),
        "longest": _LONGEST,
        "chi_square": {"draws": _DRAWS, "chances": chances},
    }
    write_result("lossless", claims, details, time.monotonic() - began, arguments.out)


def _compare(dtype: torch.dtype, sequences: int) -> Comparison:
    requests = Requests(seed=3).take(sequences, _LONGEST)
    plain = _answers(engine(_ROWS, dtype=dtype), Part("off", Off(), requests))
    guessing = engine(_ROWS, dtype=dtype)
    done: dict[int, Completion] = {}
    parts: dict[str, dict[str, int]] = {}
    for part in _parts(requests):
        found = _answers(guessing, part)
        parts[part.name] = {
            "answers": len(found),
            "tokens": sum(len(c.tokens) for c in found.values()),
            "accepted": sum(map(_accepted, found.values())),
            "identical": sum(found[id].tokens == plain[id].tokens for id in found),
        }
        done |= found
    different = [r for r in requests if done[r.id].tokens != plain[r.id].tokens]
    return Comparison(
        share=1.0 - len(different) / sequences,
        parts=parts,
        gaps=[gap_at_the_fork(MODEL, r, done[r.id].tokens, plain[r.id].tokens) for r in different],
        off_logprobs=max(
            _logprob_error(r, done[r.id]) for r in requests[:: max(1, sequences // _FORCED)]
        ),
        tokens=sum(len(c.tokens) for c in done.values()),
    )


def _accepted(done: Completion) -> int:
    return sum(span.tokens for span in done.origins if span.origin == "accepted")


def _p_values() -> dict[str, float]:
    """Return p-values of the second tokens under the policy's distribution."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        policy = drafter_models.predictable_policy(Path(name))
        drafter = drafter_models.fitted_drafter("eagle", policy)
        prompt = random_prompts(1, shortest=5)[0]
        for sampling in (Sampling(), Sampling(temperature=0.5, top_k=20)):
            expected = second_tokens(policy, prompt, sampling)
            for strategy in TOY_ARMS:
                made = toy_engine(policy, drafter, strategy, slots=_ROWS, dtype=torch.float32)
                sent = [new_request(i, prompt, sampling, max_new_tokens=2) for i in range(_DRAWS)]
                tokens = [done.tokens[1] for done in answers(made, sent).values()]
                counts = torch.tensor(tokens).bincount(minlength=len(expected))
                label = f"{name_of(strategy)}, temperature {sampling.temperature}"
                found[label] = p_value(counts, expected, at_least=3)
    return found


def _parts(requests: Sequence[Request]) -> list[Part]:
    strategies = [arm for arm in ARMS if arm != Off()]
    fixed = round((1.0 - _SWITCHING) * len(requests))
    cuts = [round(fixed * i / len(strategies)) for i in range(len(strategies) + 1)]
    parts = [
        Part(name_of(strategy), strategy, requests[first:last])
        for strategy, (first, last) in zip(strategies, pairwise(cuts), strict=True)
    ]
    return [*parts, Part("switching", None, requests[fixed:])]


def _answers(made: NativeEngine, part: Part) -> dict[int, Completion]:
    dice, version = random.Random(part.name), 1
    drafters = _drafters() if part.strategy is None else []
    if part.strategy is not None:
        made.speculation.set_strategy(part.strategy)
    made.submit(part.requests)
    done: dict[int, Completion] = {}
    while made.running:
        if part.strategy is None:
            made.speculation.set_strategy(dice.choice(ARMS))
            if dice.random() < _SWAPPED:
                version += 1
                made.speculation.adopt_drafter(DrafterVersion(version), dice.choice(drafters))
        done |= {completion.id: completion for completion in made.step()}
    return done


def _drafters() -> list[Drafter]:
    """Return the fitting drafter several times, a perturbed one, and a random one."""
    layers = load_decoder(MODEL, torch.float32).config.layers
    good, worse = load_drafter(DRAFTER, layers), load_drafter(DRAFTER, layers)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in worse.parameters():
            weight.add_(0.2 * weight.std() * torch.randn_like(weight))
    useless = new_drafter(good.config)
    return [good, good, worse, useless]


def _logprob_error(request: Request, done: Completion) -> float:
    logits = forced_logits(MODEL, request.prompt, done.tokens)
    expected = logprobs_of(logits, done.tokens, 1.0)
    return (torch.tensor(done.logprobs, dtype=expected.dtype) - expected).abs().max().item()


if __name__ == "__main__":
    main()
