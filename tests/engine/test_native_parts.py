"""Noise, stop strings, timelines and batch segments of the native engine."""

import random
from collections.abc import Sequence
from itertools import pairwise

import torch

from tlt.base.id_types import Member, PromptIndex, Step
from tlt.engine.base import NoiseKey
from tlt.engine.native.gumbel_noise import GumbelNoise, key_word
from tlt.engine.native.rows_by_length import cheapest_segments
from tlt.engine.native.token_origins import RunLengthSeries
from tlt.engine.stop_strings import completes_stop_string


def word(seed: int = 1, step: int = 0, eval: bool = False, prompt: int = 0, member: int = 0) -> int:
    return key_word(
        NoiseKey(
            seed=seed,
            step=Step(step),
            purpose="eval" if eval else "train",
            prompt=PromptIndex(prompt),
            member=Member(member),
        )
    )


def test_every_part_of_a_key_changes_the_noise() -> None:
    words = {
        word(seed, step, eval, prompt, member)
        for seed in (0, 1, 2**63, -5)
        for step in range(3)
        for eval in (False, True)
        for prompt in range(4)
        for member in range(4)
    }
    assert len(words) == 4 * 3 * 2 * 4 * 4


def test_noise_follows_the_gumbel_distribution_into_the_tail() -> None:
    keys = torch.tensor([word(member=m) for m in range(32)])
    draws = [
        GumbelNoise(4096, torch.device("cpu")).gumbel(keys, torch.full((32,), p)) for p in range(32)
    ]
    noise = torch.cat(draws).double().flatten()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772157) < 0.005
    assert abs(noise.var() - torch.pi**2 / 6) < 0.01
    for height in (2.0, 5.0, 8.0, 11.0):
        expected = len(noise) * (1 - torch.exp(-torch.exp(torch.tensor(-height).double())))
        assert abs((noise > height).sum() - expected) < 4 * expected.sqrt()


def test_noise_is_independent_between_neighbours() -> None:
    keys = torch.tensor([word(member=m) for m in range(64)])
    noise = GumbelNoise(512, torch.device("cpu"))
    here, there = (noise.gumbel(keys, torch.full((64,), p)) for p in (10, 11))
    for one, other in (
        (here, there),
        (here[:, 1:], here[:, :-1]),
        (here[1:], here[:-1]),
        (here[:, 1:], there[:, :-1]),
    ):
        pairs = torch.stack([one.flatten(), other.flatten()]).double()
        assert abs(torch.corrcoef(pairs)[0, 1]) < 0.02


def test_finds_a_stop_string_when_it_first_appears() -> None:
    pieces = ["", "a", "b", "ab", "ba", "aab", ""]
    dice = random.Random(3)

    def decode(tokens: Sequence[int]) -> str:
        return "".join(pieces[token] for token in tokens)

    for _ in range(300):
        stops = ["".join(dice.choices("ab", k=dice.randint(1, 9))) for _ in range(2)]
        tokens: list[int] = []
        for _ in range(60):
            tokens.append(dice.randrange(len(pieces)))
            present = any(stop in decode(tokens) for stop in stops)
            assert completes_stop_string(tokens, stops, decode) == present
            if present:
                break


def test_finds_a_stop_string_behind_a_character_cut_by_the_window() -> None:
    pieces = [bytes([byte]) for byte in "😀".encode()] + [b"ab", b"c"]

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    assert completes_stop_string(range(6), ["😀abc"], decode)


def test_timeline_returns_any_interval() -> None:
    values = [1, 1, 2, 2, 2, 1, 3, 3]
    timeline = RunLengthSeries[int]()
    for step, value in enumerate(values):
        timeline.record(step, value)
    for oldest in range(len(values)):
        timeline.forget(oldest)
        for start in range(oldest, len(values)):
            for end in range(start, len(values) + 1):
                spans = timeline.spans(start, end)
                assert [v for v, n in spans for _ in range(n)] == values[start:end]
                assert all(a != b for (a, _), (b, _) in pairwise(spans))


def test_segments_cover_the_batch_and_separate_a_long_row() -> None:
    lengths = [30, 41, 35, 2900, 38, 38, 38, 900, 905]
    segments = cheapest_segments(lengths)
    assert [i for s in segments for i in range(s.first, s.last)] == list(range(len(lengths)))
    assert [(s.width, s.level) for s in segments] == [
        (41, False),
        (2900, True),
        (38, True),
        (905, False),
    ]
    assert len(cheapest_segments([50] * 64)) == 1
