"""Groups of simulated answers: members of a group are about as long, as in real rollouts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from tlt.simulation.inputs import Inputs, LengthSpec
from tlt.spec.config import JobSpec


@dataclass(eq=False, slots=True)
class Answer:
    group: "Group"
    member: int
    length: int
    # times that it was cut off and gone on with
    attempt: int = 0
    # tokens that it has when it runs no more, and those of them that are of older weights
    done: int = 0
    older: int = 0
    # worker seconds that it took, and its worker's clock when it was taken
    seconds: float = 0.0
    began: float = 0.0


class Group:
    def __init__(self, number: int, lengths: Sequence[int]) -> None:
        self.number = number
        self.answers = [Answer(self, member, length) for member, length in enumerate(lengths)]
        self.tokens = sum(lengths)
        # the prompt and the step that it was issued for
        self.prompt = self.step = 0


def draw_groups(spec: JobSpec, inputs: Inputs, seed: int) -> Iterator[Group]:
    """Draw groups, the same ones in the same order for each simulation of a seed."""
    size, random = spec.algorithm.group_size, Random(seed)
    for number in count():
        drawn = _draw_lengths(inputs.lengths, size, random)
        yield Group(
            number, [max(1, min(round(each), spec.rollout.max_new_tokens)) for each in drawn]
        )


def _draw_lengths(
    lengths: LengthSpec | tuple[tuple[int, ...], ...], size: int, random: Random
) -> Sequence[float]:
    if isinstance(lengths, LengthSpec):
        shared = lengths.sigma * math.sqrt(lengths.shared)
        mean = math.log(lengths.median) + random.gauss(0.0, shared)
        spread = lengths.sigma * math.sqrt(1.0 - lengths.shared)
        return [math.exp(random.gauss(mean, spread)) for _ in range(size)]
    recorded = random.choice(lengths)
    # the members of another number of answers are drawn anew
    return recorded if len(recorded) == size else random.choices(recorded, k=size)
