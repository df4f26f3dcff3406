"""The answers of an evaluation by set: the sets' prompts follow one another in its batch."""

import math
from collections.abc import Sequence

from tlt.policies.run.rollout_batch import Answer, RolloutBatch
from tlt.policies.run.run_state import RunState
from tlt.protocol.shared_values import EvaluationAnswer, PromptSet, SetAnswers

# by set: the mean reward of each prompt's answers; None where none has a reward
PromptMeans = dict[str, tuple[float | None, ...]]


def answers_by_prompt(state: RunState) -> tuple[int, ...]:
    """Return the number of answers to each held-out prompt."""
    return tuple(_answers(state, each) for each in state.eval_sets for _ in range(each.prompts))


def _answers(state: RunState, held_out: PromptSet) -> int:
    known = state.spec.data.evaluation_sets.get(held_out.name)
    return 1 if known is None else known.answers


def split_into_sets(state: RunState, batch: RolloutBatch) -> tuple[SetAnswers, ...]:
    groups = iter(batch.groups.values())
    return tuple(
        SetAnswers(
            name=each.name,
            prompts=tuple(
                tuple(map(_evaluated, next(groups).members)) for _ in range(each.prompts)
            ),
            skipped=each.skipped,
        )
        for each in state.eval_sets
    )


def _evaluated(answer: Answer) -> EvaluationAnswer:
    score = answer.score
    return EvaluationAnswer(
        reward=answer.reward,
        length=answer.length,
        truncated=answer.truncated,
        final=None if score is None else score.final,
        correct=answer.correct,
    )


def prompt_means(sets: Sequence[SetAnswers]) -> PromptMeans:
    return {each.name: tuple(map(mean_reward, each.prompts)) for each in sets}


def mean_reward(answers: Sequence[EvaluationAnswer]) -> float | None:
    """Return the mean of the answers that have a reward."""
    return mean([answer.reward for answer in answers])


def mean_over_sets(means: PromptMeans) -> float | None:
    """Return the mean of the sets' means: a small set counts as much as a large one."""
    return mean([mean(each) for each in means.values()])


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
