"""Know the sizes that a job's workers have chosen where its spec leaves them open.

A worker that starts again gets those that it had chosen before.
"""

import msgspec

from tlt.policies.run.evaluation_answers import answers_by_prompt
from tlt.policies.run.run_state import RunState, Turn, WorkerState, current_worker
from tlt.protocol.commands import StartJob
from tlt.protocol.events import SizesChosen
from tlt.protocol.shared_values import ChosenSizes, SizingFacts, WorkerInfo


def begin(turn: Turn, event: StartJob) -> None:
    """Note what ranks choose sizes by, if the spec leaves any open."""
    if not event.spec.leaves_sizes_open:
        return
    state, algorithm = turn.state, event.spec.algorithm
    facts = SizingFacts(
        ranks=sum(info.ranks for info in event.workers),
        answers=event.spec.issued_answers if algorithm.steps else sum(answers_by_prompt(state)),
        longest_prompt=event.prepared.longest_prompt,
    )
    turn.set(membership=msgspec.structs.replace(state.membership, sizing=facts))


def facts_for(state: RunState, info: WorkerInfo) -> SizingFacts | msgspec.UnsetType:
    known = state.membership
    if known.sizing is None:
        return msgspec.UNSET
    facts = known.sizing
    if facts.ranks == 0:  # the job began while all of its workers were starting again
        joined = {worker: each.info for worker, each in state.workers.items()}
        ranks = sum(each.ranks for each in (joined | {info.worker: info}).values())
        facts = msgspec.structs.replace(facts, ranks=ranks)
    return msgspec.structs.replace(facts, chosen=known.chosen_sizes.get(info.worker))


def record(turn: Turn, event: SizesChosen) -> None:
    """Note the smallest sizes of a worker's ranks."""
    if current_worker(turn.state, event.worker, event.incarnation) is None:
        return
    known, new = turn.state.membership, event.sizes
    before = known.chosen_sizes.get(event.worker, new)
    smallest = ChosenSizes(
        slots=min(before.slots, new.slots),
        microbatch_tokens=min(before.microbatch_tokens, new.microbatch_tokens),
        cache_tokens=min(filter(None, (before.cache_tokens, new.cache_tokens)), default=None),
    )
    sizes = {**known.chosen_sizes, event.worker: smallest}
    turn.set(membership=msgspec.structs.replace(known, chosen_sizes=sizes))


def engine_slots(state: RunState, worker: WorkerState) -> int:
    """Return the slots of each of a worker's engines; until it has chosen, the most it may have."""
    slots, facts = state.spec.rollout.slots, facts_for(state, worker.info)
    if slots != "auto":
        return slots
    return 1 if facts is msgspec.UNSET else facts.most_slots(state.spec.rollout)


def fewest_slots(state: RunState) -> int:
    """Return the slots of the engine that has fewest."""
    slots = state.spec.rollout.slots
    if slots != "auto":
        return slots
    return min((engine_slots(state, worker) for worker in state.workers.values()), default=1)


def slots_of(state: RunState, worker: WorkerState) -> int:
    """Return the slots of all of a worker's engines."""
    engines = len(state.spec.rollout.engine_ranks(worker.info.ranks))
    return engine_slots(state, worker) * engines
