"""Compare the engine's speed with n-grams and without speculation.

Two engines decode the same whole answers in turns: one without speculation, the other with n-grams
of up to eight tokens and with the earlier answers of a situation. Speeds are tokens per CPU second
of the thread.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.engine import MODEL, request
from benchmarks.speculating import GROUP, SPEC, cpu_seconds, held_out_prompts
from tlt.base.id_types import PolicyVersion
from tlt.base.strategies import Ngram, Off, Strategy
from tlt.engine.base import Completion, Request
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.tokenizer import Tokenizer
from tlt.spec.spec_files import load_job_spec

_NGRAM = Ngram(tokens=8)
_ARMS = (Off(), _NGRAM)
# members of a group that are decoded before the others are measured
_FINISHED = 8


class _Turn(NamedTuple):
    situation: str
    before: Sequence[Request]
    measured: Sequence[Request]


class _Measurement(NamedTuple):
    tokens: int
    accepted: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def speeds(groups: int) -> dict[str, dict[str, Any]]:
    """Measure each situation `groups` times, each time with other prompts."""
    plain, guessing = _engine(), _engine()
    seen: dict[str, list[tuple[_Measurement, _Measurement]]] = defaultdict(list)
    for turn in _turns(groups):
        _measure(guessing, Off(), turn.before)
        theirs = _measure(plain, Off(), turn.measured)
        ours = _measure(guessing, _NGRAM, turn.measured)
        seen[turn.situation].append((theirs, ours))
    return {situation: _summary(turns) for situation, turns in seen.items()}


def _turns(groups: int) -> Iterator[_Turn]:
    make, prompts = _RequestMaker(), iter(held_out_prompts())
    for _ in range(groups):
        yield _Turn("itself_batch1", (), make(next(prompts), 1))
        yield _Turn("itself_batch4", (), [make(next(prompts), 1)[0] for _ in range(4)])
        yield _Turn("running_siblings_batch16", (), make(next(prompts), GROUP))
        group = make(next(prompts), GROUP)
        yield _Turn("finished_siblings_batch1", group[:_FINISHED], group[_FINISHED : _FINISHED + 1])
        for member in group[_FINISHED + 1 :]:
            yield _Turn("finished_siblings_batch1", (), [member])
        group = make(next(prompts), _FINISHED + 4)
        yield _Turn("finished_siblings_batch4", group[:_FINISHED], group[_FINISHED:])
        epochs = make(next(prompts), GROUP + 1)
        yield _Turn("earlier_epoch_batch1", epochs[:GROUP], epochs[GROUP:])
        epochs = [make(next(prompts), GROUP + 1) for _ in range(4)]
        before = [request for epoch in epochs for request in epoch[:GROUP]]
        yield _Turn("earlier_epoch_batch4", before, [epoch[GROUP] for epoch in epochs])


class _RequestMaker:
    """Make requests that all have their own noise, so that members stand for epochs as well."""

    def __init__(self) -> None:
        spec = load_job_spec(SPEC)
        self._most = spec.rollout.max_new_tokens
        self._stops = Tokenizer(spec.policy.path).stop_tokens()
        self._made = 0

    def __call__(self, prompt: Sequence[int], count: int) -> list[Request]:
        first = self._made
        self._made += count
        return [request(first + i, prompt, self._most, self._stops) for i in range(count)]


def _engine() -> NativeEngine:
    return NativeEngine(
        load_decoder(MODEL),
        decode_text=lambda tokens: "",
        slots=GROUP,
        max_context=896,
        device=torch.device("cpu"),
        version=PolicyVersion(0),
        arms=_ARMS,
    )


def _measure(engine: NativeEngine, strategy: Strategy, requests: Sequence[Request]) -> _Measurement:
    engine.speculation.set_strategy(strategy)
    engine.submit(requests)
    done: list[Completion] = []
    began = cpu_seconds()
    while engine.running:
        done += engine.step()
    seconds = cpu_seconds() - began
    spans = [span for completion in done for span in completion.origins]
    accepted = sum(span.tokens for span in spans if span.origin == "accepted")
    return _Measurement(sum(span.tokens for span in spans), accepted, seconds)


def _summary(turns: Sequence[tuple[_Measurement, _Measurement]]) -> dict[str, Any]:
    plain, guessed = (_sum_of(side) for side in zip(*turns, strict=True))
    return {
        "speedup": guessed.speed / plain.speed,
        "median_speedup": median(ours.speed / theirs.speed for theirs, ours in turns),
        "accept_length": round(guessed.tokens / (guessed.tokens - guessed.accepted), 2),
        "plain_tokens_per_second": round(plain.speed, 1),
        "ngram_tokens_per_second": round(guessed.speed, 1),
        "tokens": guessed.tokens,
        "turns": len(turns),
    }


def _sum_of(answered: Sequence[_Measurement]) -> _Measurement:
    return _Measurement(*(sum(column) for column in zip(*answered, strict=True)))
