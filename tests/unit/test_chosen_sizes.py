"""A run knows the sizes that its workers have chosen, and gives them back to those that return."""

import msgspec

from tests.samples import SPEC
from tests.simulation.started_run import WORKER, started_run
from tests.simulation.worker_events import JOB
from tlt.base.id_types import Incarnation, WorkerId
from tlt.policies.run.chosen_sizes import slots_of
from tlt.policies.run.coordinator import decide
from tlt.policies.run.run_state import RunState
from tlt.protocol.commands import OpenJob
from tlt.protocol.events import SizesChosen, WorkerJoined
from tlt.protocol.shared_values import ChosenSizes, SizingFacts, WorkerInfo
from tlt.spec.config import RolloutSpec

OPEN = msgspec.structs.replace(SPEC, rollout=RolloutSpec())
SMALL = ChosenSizes(slots=3, microbatch_tokens=512, cache_tokens=900)


def chosen(state: RunState, *, slots: int, rank: int = 0, incarnation: int = 1) -> RunState:
    event = SizesChosen(
        job=JOB,
        worker=WORKER,
        incarnation=Incarnation(incarnation),
        rank=rank,
        sizes=msgspec.structs.replace(SMALL, slots=slots),
        why="",
    )
    return decide(state, event, 1.0)[0]


def test_ranks_are_told_what_to_choose_by() -> None:
    _, commands = started_run(OPEN)
    (opening,) = [each for each in commands if isinstance(each, OpenJob)]
    assert opening.sizing == SizingFacts(ranks=1, answers=8)


def test_a_job_that_begins_while_all_workers_start_again_counts_those_that_join() -> None:
    state, _ = started_run(OPEN, without_workers=True)
    for joined, ranks in enumerate((2, 6)):
        info = WorkerInfo(
            worker=WorkerId(f"w{joined}"),
            incarnation=Incarnation(joined + 1),
            ranks=2 * (joined + 1),
            host="host",
            rendezvous="host:1",
        )
        state, commands = decide(state, WorkerJoined(info=info), 1.0)
        (opening,) = [each for each in commands if isinstance(each, OpenJob)]
        assert opening.sizing == SizingFacts(ranks=ranks, answers=8)


def test_a_spec_without_open_sizes_is_sent_as_before() -> None:
    _, commands = started_run(SPEC)
    (opening,) = [each for each in commands if isinstance(each, OpenJob)]
    assert b"sizing" not in msgspec.json.encode(opening)


def test_a_worker_has_its_share_as_slots_until_it_has_chosen() -> None:
    state, _ = started_run(OPEN)
    assert slots_of(state, state.workers[WORKER]) == 8
    state = chosen(state, slots=3)
    assert slots_of(state, state.workers[WORKER]) == 3
    assert slots_of(started_run(SPEC)[0], state.workers[WORKER]) == 16


def test_a_worker_that_starts_again_gets_the_smallest_of_its_ranks_sizes() -> None:
    state, _ = started_run(OPEN)
    state = chosen(chosen(state, slots=4), slots=3, rank=1)
    state = chosen(state, slots=2, incarnation=0)
    info = msgspec.structs.replace(state.workers[WORKER].info, incarnation=Incarnation(2))
    _, commands = decide(state, WorkerJoined(info=info), 2.0)
    (opening,) = [each for each in commands if isinstance(each, OpenJob)]
    assert opening.sizing is not msgspec.UNSET
    assert opening.sizing.chosen == SMALL
