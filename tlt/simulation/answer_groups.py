"""Groups of simulated answers: members of a group are about as long, as in real rollouts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tlt.simulation.inputs import Inputs, LengthSpec
from tlt.spec.config import JobSpec


@dataclass(eq=False, slots=True)
class Answer:
    group: "Group"
    member: int
    length: int
    # tokens that it had when it was last cut off, and those that count although weights are older
    done: int = 0
    carried: int = 0
    # worker seconds that it took, and its worker's clock when it was taken
    seconds: float = 0.0
    began: float = 0.0


class Group:
    def __init__(self, number: int, lengths: Sequence[int]) -> None:
        self.number = number
        self.answers = [Answer(self, member, length) for member, length in enumerate(lengths)]
        self.tokens = sum(lengths)
        self.unfinished = len(lengths)


class GroupSource:
    """Draws groups, the same ones in the same order for each simulation of a seed."""

    def __init__(self, spec: JobSpec, inputs: Inputs, seed: int) -> None:
        self._size, self._cap = spec.algorithm.group_size, spec.rollout.max_new_tokens
        self._lengths = inputs.lengths
        self._random = Random(seed)
        self._drawn = 0

    def draw(self, groups: int) -> list[Group]:
        self._drawn += groups
        return [Group(self._drawn - groups + i, self._draw_lengths()) for i in range(groups)]

    def _draw_lengths(self) -> list[int]:
        lengths, size = self._lengths, self._size
        if isinstance(lengths, LengthSpec):
            drawn = _log_normal(lengths, size, self._random)
        else:
            # the members of another number of answers are drawn anew
            recorded = self._random.choice(lengths)
            same = len(recorded) == size
            drawn = recorded if same else self._random.choices(recorded, k=size)
        return [max(1, min(round(length), self._cap)) for length in drawn]


def _log_normal(lengths: LengthSpec, size: int, random: Random) -> list[float]:
    mean = math.log(lengths.median) + random.gauss(0.0, lengths.sigma * math.sqrt(lengths.shared))
    spread = lengths.sigma * math.sqrt(1.0 - lengths.shared)
    return [math.exp(random.gauss(mean, spread)) for _ in range(size)]
