"""Share samples among ranks: each sample goes to one rank, and ranks get about equal tokens."""

import heapq
from collections.abc import Iterable, Sequence

import msgspec

from tlt.base.id_types import Member, PromptIndex, Step
from tlt.policies.algorithm.advantages import agree
from tlt.policies.keyed_random import mix
from tlt.protocol.refs import AnswerRef, MinibatchShare, SampleRef


class Sample(msgspec.Struct, frozen=True, array_like=True):
    prompt: PromptIndex
    member: Member
    reward: float
    advantage: float
    length: int
    answer: AnswerRef
    prompt_length: int = 0

    @property
    def computed(self) -> int:
        """Return the tokens of a forward pass: the prompt is read, too."""
        return self.prompt_length + self.length


class UpdatePlan(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    samples: tuple[Sample, ...]
    # answers without an advantage: nothing is computed for them, but they count in the averages
    silent: tuple[Sample, ...] = ()


def count_teaching_groups(samples: Iterable[Sample]) -> int:
    """Count the groups that have an advantage, or different rewards that ranks will compare."""
    groups: dict[PromptIndex, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    return sum(
        any(sample.advantage for sample in group) or not agree([s.reward for s in group])
        for group in groups.values()
    )


def share_samples(
    samples: Sequence[Sample],
    silent: Sequence[Sample],
    workers: Sequence[int],
    minibatches: int,
    *key: int,
) -> list[tuple[MinibatchShare, ...]]:
    """Return each worker's share of every minibatch; `workers` are their numbers of ranks.

    Silent samples count in a minibatch's totals, so that the size of an update doesn't depend on
    how many groups teach something. Minibatches of silent samples alone are left out.
    """
    quiet = {(s.prompt, s.member) for s in silent}
    order = sorted([*samples, *silent], key=lambda s: mix(*key, s.prompt, s.member))
    count = max(1, min(minibatches, len(order)))
    world = sum(workers)
    per_worker: list[list[MinibatchShare]] = [[] for _ in workers]
    for index in range(count):
        batch = order[index::count]
        heard = [sample for sample in batch if (sample.prompt, sample.member) not in quiet]
        if batch and not heard:
            continue
        ranks = _balanced(heard, world)
        tokens = sum(s.length for s in batch)
        first = 0
        for worker, size in enumerate(workers):
            per_worker[worker].append(
                MinibatchShare(
                    ranks=tuple(
                        tuple(
                            SampleRef(
                                prompt=s.prompt,
                                member=s.member,
                                reward=s.reward,
                                advantage=s.advantage,
                                answer=s.answer,
                            )
                            for s in rank
                        )
                        for rank in ranks[first : first + size]
                    ),
                    total_tokens=tokens,
                    total_sequences=len(batch),
                )
            )
            first += size
    return [tuple(share) for share in per_worker]


def _balanced(batch: Sequence[Sample], world: int) -> list[list[Sample]]:
    """Give samples, longest first, to the rank with the fewest tokens so far."""
    ranks: list[list[Sample]] = [[] for _ in range(world)]
    # load and index of each rank, the lightest first
    loads = [(0, rank) for rank in range(world)]
    for sample in sorted(batch, key=lambda s: (-s.computed, s.prompt, s.member)):
        load, lightest = loads[0]
        ranks[lightest].append(sample)
        heapq.heapreplace(loads, (load + sample.computed, lightest))
    return ranks
