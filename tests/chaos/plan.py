"""Draw the faults of each job: every kind some times, the quick ones more often."""

from collections.abc import Sequence
from random import Random

from tests.chaos.fault import Fault
from tests.chaos.file_faults import FILES, REFUSED
from tests.chaos.message_faults import MESSAGES
from tests.chaos.process_faults import KILLS, STOPS
from tests.chaos.resource_faults import RESOURCES

FAULTS: dict[str, Fault] = {**KILLS, **STOPS, **MESSAGES, **FILES, **RESOURCES, **REFUSED}
_LEAST = 3
# those after which Python and torch are imported again; all others are drawn eight times as often
_SLOW = frozenset(
    (
        *("kill a rank", "kill a worker", "kill the reward scorer"),
        "stop a worker past its lease",
        *("damage the blobs in flight", "fill the disk", "fill the shared memory"),
    )
)
# all of Ray starts again, or the job ends: no more than the least
_RARE = frozenset((*REFUSED, *(name for name in KILLS if "Ray" in name or "tlt up" in name)))


def draw(rounds: int, jobs: int, dice: Random, only: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Share `rounds` faults among jobs, in an order that the dice choose.

    A fault that ends its job is the last one of that job.
    """
    names, rounds = list(only or FAULTS), max(0, rounds)
    drawn = names * min(_LEAST, rounds // len(names))
    more = [name for name in names if name not in _RARE] or names
    weights = [1 if name in _SLOW else 8 for name in more]
    drawn += dice.choices(more, weights, k=rounds - len(drawn))
    last = [name for name in drawn if name in REFUSED]
    others = [name for name in drawn if name not in REFUSED]
    dice.shuffle(others)
    shared = [others[job::jobs] for job in range(jobs)]
    for number, name in enumerate(last):
        shared[number * jobs // len(last)].append(name)
    return [tuple(faults) for faults in shared if faults]
