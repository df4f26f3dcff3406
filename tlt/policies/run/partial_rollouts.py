"""End a step once enough groups are complete, and carry the others over (`rollout.partial`).

A step issues more groups than it needs. The answers that are unfinished when it ends are cut; the
next step goes on with their tokens, before it takes new prompts. So no prompt is lost, and an
answer may have tokens of several policies. The last step issues only what it needs.
"""

import math

from tlt.base.id_types import Attempt, Member, PromptIndex, Step
from tlt.policies.run import rollout_batch
from tlt.policies.run.rollout_batch import Answer, AnswerEvent, CarriedGroup, RolloutBatch
from tlt.policies.run.run_state import Duty, RunState, Turn
from tlt.protocol.commands import CutAnswers, ResumeAnswers
from tlt.protocol.refs import ResumedAnswer
from tlt.spec.config import JobSpec


def surplus_groups(spec: JobSpec) -> int:
    """Return how many groups a step issues beyond those that it needs."""
    return math.ceil(spec.rollout.partial * spec.algorithm.prompts_per_step)


def count_new_groups(state: RunState) -> int:
    """Return how many prompts the step to be opened takes."""
    needed = state.spec.algorithm.prompts_per_step
    if state.step + 1 < state.spec.algorithm.steps:
        needed += surplus_groups(state.spec)
    dynamic = state.spec.algorithm.dynamic_sampling
    left = sum(
        not (dynamic and each.group.settled and each.group.agrees)
        for each in state.carried.values()
    )
    return max(0, needed - left)


def add_carried_groups(state: RunState, batch: RolloutBatch) -> RolloutBatch:
    """Return a new batch with the groups that earlier steps have left, which come first."""
    if not surplus_groups(state.spec):
        return batch
    algorithm = state.spec.algorithm
    return rollout_batch.carry(
        batch, state.carried, algorithm.prompts_per_step, differing=algorithm.dynamic_sampling
    )


def resume(turn: Turn, batch: RolloutBatch) -> RolloutBatch:
    """Put the answers that were cut into the queue of the batch to be opened; return it."""
    cut = [
        resumed(batch.step_of(prompt), prompt, index, answer)
        for prompt in batch.steps
        for index, answer in enumerate(batch.groups[prompt].members)
        if answer.is_cut
    ]
    if cut:
        turn.emit(ResumeAnswers(job=turn.state.job, epoch=turn.state.epoch, answers=tuple(cut)))
    for each in cut:
        batch = rollout_batch.queue_again(batch, each.prompt, each.member)
    return batch


def split(turn: Turn, batch: RolloutBatch) -> RolloutBatch:
    """Return the complete groups; carry the others over, and have their answers cut."""
    complete, carried = rollout_batch.split(batch)
    if not (carried or turn.state.carried):
        return batch
    turn.set(carried=carried)
    for worker, known in turn.state.workers.items():
        if known.duty is Duty.ROLLOUT:
            turn.emit(
                CutAnswers(worker=worker, incarnation=known.info.incarnation, job=turn.state.job)
            )
    return complete


def settle_carried(turn: Turn, event: AnswerEvent) -> None:
    """Record what becomes of an answer between two steps."""
    before = turn.state.carried.get(event.prompt)
    if before is None or event.purpose != "train" or event.step != before.step:
        return
    if event.member >= len(before.group.members):
        return
    group = rollout_batch.settle_in_group(before.group, event)
    if group is not before.group:
        after = CarriedGroup(group=group, step=before.step)
        turn.set(carried={**turn.state.carried, event.prompt: after})


def resumed(step: Step, prompt: PromptIndex, member: int, answer: Answer) -> ResumedAnswer:
    assert answer.cut is not None, "it was cut"
    return ResumedAnswer(
        step=step,
        prompt=prompt,
        member=Member(member),
        attempt=Attempt(answer.cut.attempt + 1),
        excused=answer.cut.excused + 1,
        prefix=answer.cut.answer,
    )
