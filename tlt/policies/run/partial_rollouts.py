"""End a step once enough groups are complete, and carry the others over (`rollout.partial`).

A step issues more groups than it needs. The answers that are unfinished when it ends are cut; the
next step goes on with their tokens, before it takes new prompts. So no prompt is lost, and an
answer may have tokens of several policies. The last step issues only what it needs. With
`rollout.defer_long`, groups that aren't complete are put off instead.
"""

from tlt.base.id_types import Attempt, Member, PromptIndex, Step
from tlt.policies.run import deferred_groups, rollout_batch
from tlt.policies.run.rollout_batch import Answer, AnswerEvent, CarriedGroup, RolloutBatch
from tlt.policies.run.run_state import Duty, RunState, Turn
from tlt.protocol.commands import ResumeAnswers
from tlt.protocol.refs import ResumedAnswer


def count_new_groups(state: RunState, needed: int) -> int:
    """Return how many prompts the step to be opened takes, if it needs so many new groups."""
    algorithm, rollout = state.spec.algorithm, state.spec.rollout
    if rollout.partial and state.step + 1 < algorithm.steps:
        needed += rollout.surplus(algorithm.prompts_per_step)
    dynamic = algorithm.dynamic_sampling
    left = sum(
        not (dynamic and each.group.settled and each.group.agrees)
        for each in state.carried.values()
    )
    return max(0, needed - left)


def end_early(state: RunState, batch: RolloutBatch) -> RolloutBatch:
    """Return a new batch that ends with enough groups; those that steps have left come first."""
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
    """Return the complete groups; carry the others over or put them off, and cut their answers."""
    complete, rest = rollout_batch.split(batch)
    if not (rest or turn.state.carried):
        return batch
    if turn.state.spec.rollout.defer_long:
        deferred_groups.put_off(turn, rest)
    else:
        turn.set_later(carried=rest)
    for known in turn.state.workers.values():
        if known.duty is Duty.ROLLOUT:
            turn.cut(known)
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
        turn.set_later(carried={**turn.state.carried, event.prompt: after})


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
