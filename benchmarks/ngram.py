"""Measure what n-grams propose for real rollouts, and the cost of their index.

`python -m benchmarks.ngram --out F.json`

Groups of 16 are decoded with the tiny reasoner, each prompt twice with different noise, and then
replayed: a verify step gains the correct proposals and one more token. A source is what the index
holds besides the prompt and the row's own tokens. Running siblings start together and propose
before any of them goes on; beside finished siblings, or an earlier epoch, each row is replayed
alone. In a queue 32 slots are refilled group by group or, so that siblings are apart, member by
member. The index's microseconds are CPU time. `benchmarks.ngram_speeds` measures the engine's
gains.
"""

import argparse
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import MODEL, request
from benchmarks.ngram_speeds import speeds
from benchmarks.result import Claim, write_result
from tlt.base.id_types import PolicyVersion
from tlt.data.dataset import read_rows
from tlt.engine.native import NativeEngine
from tlt.engine.ngram import NgramIndex
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.tokenizer import Tokenizer
from tlt.spec.spec_files import load_job_spec

_ROOT = Path(__file__).resolve().parent.parent
_PROMPTS, _MEMBERS, _SLOTS = 10, 16, 32
_CONTEXT = 896
_COUNTS = (4, 8, 12, 16)
_SOURCES = (
    "own_tokens",
    "running_siblings",
    "finished_siblings",
    "earlier_epoch",
    "earlier_epoch_and_running_siblings",
)
_BUDGET = 1 << 28
_MEASURED_GROUPS = 4
_CLAIMED = "finished_siblings", 8


@dataclass(frozen=True)
class _Group:
    index: int
    prompt: list[int]
    answers: list[list[int]]
    # answers to the same prompts with other noise
    earlier: list[list[int]]


@dataclass
class _Steps:
    """Counts of verify steps of single rows."""

    count: int = 0
    tokens: int = 0
    # CPU seconds of the index
    seconds: float = 0.0

    @property
    def accept_length(self) -> float:
        return self.tokens / self.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    groups = _decode_groups()
    steps = {source: {n: _replay_source(source, groups, n) for n in _COUNTS} for source in _SOURCES}
    queue = {count: _queue(_by_group(groups), count) for count in _COUNTS}
    spread = {count: _queue(_by_member(groups), count) for count in _COUNTS}
    gained = speeds(_MEASURED_GROUPS)
    source, count = _CLAIMED
    claims = [
        Claim(
            name=f"ngram.accept_length.{source}",
            value=steps[source][count].accept_length,
            unit="tokens",
            bar=4.5,
        ),
        Claim(
            name="ngram.index.step_of_32_rows",
            value=queue[count]["index_milliseconds_per_32_rows"],
            unit="ms",
            bar=2.0,
            less_is_better=True,
        ),
        Claim(
            name="speculation.ngram_speedup.finished_siblings_batch1",
            value=gained["finished_siblings_batch1"]["speedup"],
            unit="x",
            bar=1.8,
        ),
    ]
    details: dict[str, Any] = {
        "prompts": _PROMPTS,
        "group_size": _MEMBERS,
        "tokens": sum(len(answer) for group in groups for answer in group.answers),
        "proposed": count,
        "accept_length": {
            source: {n: round(by.accept_length, 2) for n, by in by_count.items()}
            for source, by_count in steps.items()
        },
        "queue_by_group": queue,
        "queue_by_member": spread,
        "measured_groups": _MEASURED_GROUPS,
        "engine": gained,
    }
    write_result("ngram", claims, details, time.monotonic() - began, arguments.out)


def _decode_groups() -> list[_Group]:
    spec = load_job_spec(_ROOT / "configs" / "tiny-reasoner.yaml")
    tokenizer = Tokenizer(spec.policy.path)
    table = [row for _, row in islice(read_rows(Path(spec.data.sources[0].path)), _PROMPTS)]
    prompts = [tokenizer.prompt_tokens(row["prompt"], spec.data, "train") for row in table]
    limit, stops = spec.rollout.max_new_tokens, tokenizer.stop_tokens()
    engine = NativeEngine(
        load_decoder(MODEL),
        decode_text=lambda tokens: "",
        slots=_SLOTS,
        max_context=_CONTEXT,
        device=torch.device("cpu"),
        version=PolicyVersion(0),
    )
    # members have different noise, so their second half serves as another epoch
    each = 2 * _MEMBERS
    engine.submit([request(i, prompts[i // each], limit, stops) for i in range(_PROMPTS * each)])
    answers: dict[int, list[int]] = {}
    while engine.running:
        answers |= {done.id: done.tokens for done in engine.step()}
    ordered = [answers[i] for i in range(_PROMPTS * each)]
    return [
        _Group(
            index=index,
            prompt=list(prompt),
            answers=ordered[index * each : index * each + _MEMBERS],
            earlier=ordered[index * each + _MEMBERS : (index + 1) * each],
        )
        for index, prompt in enumerate(prompts)
    ]


def _replay_source(source: str, groups: Sequence[_Group], count: int) -> _Steps:
    steps = _Steps()
    for group in groups:
        for index, answers in _situations(source, group):
            _replay(index, [(group, answer) for answer in answers], count, steps)
    return steps


def _situations(source: str, group: _Group) -> Iterator[tuple[NgramIndex, list[list[int]]]]:
    """Return the sources that are indexed when these answers start together."""
    alone = [[answer] for answer in group.answers]
    match source:
        case "own_tokens":
            yield from ((_index_of(group, []), answer) for answer in alone)
        case "running_siblings":
            yield _index_of(group, []), group.answers
        case "finished_siblings":
            for i, answer in enumerate(alone):
                yield _index_of(group, group.answers[:i] + group.answers[i + 1 :]), answer
        case "earlier_epoch":
            yield from ((_index_of(group, group.earlier), answer) for answer in alone)
        case _:
            yield _index_of(group, group.earlier), group.answers


def _index_of(group: _Group, answers: Sequence[Sequence[int]]) -> NgramIndex:
    index = NgramIndex(_BUDGET)
    for answer in answers:
        index.add(group.index, group.prompt, answer)
    return index


def _replay(
    index: NgramIndex,
    answers: Sequence[tuple[_Group, list[int]]],
    count: int,
    steps: _Steps,
) -> None:
    waiting = deque(enumerate(answers))
    left: dict[int, list[int]] = {}
    while waiting or left:
        while waiting and len(left) < _SLOTS:
            row, (group, left[row]) = waiting.popleft()
            index.begin(row, group.prompt, group.index)
        started = time.process_time()
        proposals = {row: index.propose(row, count) for row in left}
        proposed = time.process_time()
        new: dict[int, list[int]] = {}
        for row, tokens in proposals.items():
            new[row] = left[row][: _count_accepted(tokens, left[row]) + 1]
        checked = time.process_time()
        for row, tokens in new.items():
            index.extend(row, tokens)
        steps.seconds += time.process_time() - checked + proposed - started
        steps.count += len(new)
        steps.tokens += sum(map(len, new.values()))
        left = {row: rest for row in left if (rest := left[row][len(new[row]) :])}
        for row in new.keys() - left.keys():
            index.end(row)


def _count_accepted(proposed: Sequence[int], true: Sequence[int]) -> int:
    for position, (guess, token) in enumerate(zip(proposed, true, strict=False)):
        if guess != token:
            return position
    return min(len(proposed), len(true))


def _by_group(groups: Sequence[_Group]) -> list[tuple[_Group, list[int]]]:
    return [(group, answer) for group in groups for answer in group.answers]


def _by_member(groups: Sequence[_Group]) -> list[tuple[_Group, list[int]]]:
    return [(group, group.answers[member]) for member in range(_MEMBERS) for group in groups]


def _queue(answers: Sequence[tuple[_Group, list[int]]], count: int) -> dict[str, float]:
    steps, index = _Steps(), NgramIndex(_BUDGET)
    _replay(index, answers, count, steps)
    return {
        "accept_length": round(steps.accept_length, 2),
        "index_microseconds_per_token": round(1e6 * steps.seconds / steps.tokens, 2),
        "index_milliseconds_per_32_rows": round(32e3 * steps.seconds / steps.count, 3),
        "index_bytes_per_token": round(index.bytes / steps.tokens, 1),
    }


if __name__ == "__main__":
    main()
