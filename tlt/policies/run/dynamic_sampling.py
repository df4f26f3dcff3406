"""Replace groups that agree within their rollout batch (DAPO's dynamic sampling, 2503.14476).

A batch wants `prompts_per_step` groups that differ by their rewards before the penalty for length.
The prompts that it issues are the next ones of the job's order, whichever group is known to agree
first.
"""

from tlt.base.id_types import PromptIndex, WorkerId
from tlt.policies.algorithm import prompt_order
from tlt.policies.run import rollout_batch
from tlt.policies.run.chosen_sizes import slots_of
from tlt.policies.run.rollout_batch import RolloutBatch
from tlt.policies.run.rollout_batch_opening import ROLLOUT_PHASES, assign
from tlt.policies.run.run_state import Duty, Turn
from tlt.protocol.commands import IssuePrompts
from tlt.spec.config import AlgorithmSpec


def most_groups(algorithm: AlgorithmSpec, prompts: int) -> int:
    """Return the most groups of a batch; none has a prompt twice."""
    most = algorithm.prompts_per_step
    if algorithm.dynamic_sampling:
        most = int(algorithm.max_num_gen_batches * most)
    return min(most, prompts)


def replace_agreed(turn: Turn) -> None:
    """Replace the groups of a step that were settled before it began."""
    batch = turn.state.batch
    if batch is not None:
        for prompt in tuple(batch.groups):
            batch = _replace_if_agreed(turn, batch, prompt)


def replace_if_agreed(turn: Turn, batch: RolloutBatch, prompt: PromptIndex) -> RolloutBatch:
    """Issue the next prompt if this group has just been settled and agrees; return the batch."""
    grown = _replace_if_agreed(turn, batch, prompt)
    if grown is not batch and turn.state.phase in ROLLOUT_PHASES:
        _assign_free(turn, grown)
    return grown


def _replace_if_agreed(turn: Turn, batch: RolloutBatch, prompt: PromptIndex) -> RolloutBatch:
    state, algorithm = turn.state, turn.state.spec.algorithm
    if not algorithm.dynamic_sampling or batch.purpose != "train":
        return batch
    assert state.cursor is not None
    usable = state.train_prompts - len(state.cursor.deferred)
    most = most_groups(algorithm, usable)
    if batch.wanted is not None:
        most = min(most + state.spec.rollout.surplus(algorithm.prompts_per_step), usable)
    if len(batch.groups) >= most:
        return batch
    group = batch.groups[prompt]
    if not group.settled or not group.agrees:
        return batch
    extra, cursor = prompt_order.take(
        state.spec, state.cursor, state.train_prompts, 1, batch.groups
    )
    grown = rollout_batch.add_group(batch, extra[0], algorithm.group_size)
    turn.set(batch=grown, cursor=cursor)
    turn.emit(
        IssuePrompts(
            job=state.job,
            epoch=state.epoch,
            step=batch.step,
            purpose=batch.purpose,
            prompts=extra,
            members=algorithm.group_size,
            replaces=prompt,
        )
    )
    return grown


def _assign_free(turn: Turn, batch: RolloutBatch) -> None:
    """Assign idle workers, and then others where the free slots don't suffice.

    The update waits for the group, and not for the drafter or the next step. A slot of a worker
    that decodes this batch anyway costs less than a worker that leaves other work.
    """
    busy: dict[WorkerId, int] = {}
    room = -batch.unfinished
    for worker, known in turn.state.workers.items():
        if known.duty is Duty.IDLE:
            assign(turn, worker)
        if known.duty is Duty.DRAFTER_TRAINING or known.decodes_ahead:
            busy[worker] = slots_of(turn.state, known)
        elif known.duty is not Duty.RESTARTING:
            room += slots_of(turn.state, known)
    for worker, its_slots in busy.items():
        if room >= 0:
            return
        assign(turn, worker)
        room += its_slots
