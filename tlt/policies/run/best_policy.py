"""Keep the weights of the policy that did best in an evaluation so far."""

import math

import msgspec

from tlt.policies.run import blob_retention
from tlt.policies.run.evaluation_answers import mean_over_sets, prompt_means, split_into_sets
from tlt.policies.run.policy_comparison import compare
from tlt.policies.run.rollout_batch import RolloutBatch
from tlt.policies.run.run_state import BestPolicy, RunState, Turn
from tlt.protocol.commands import CommitBestPolicy


def keep_best(turn: Turn, evaluated: RolloutBatch) -> None:
    """Replace the best policy by the current one if it did better."""
    state, before = turn.state, turn.state.policy.best
    best = _scored(state, evaluated)
    if best is None or (before is not None and not _is_better(state, before, best)):
        return
    current = state.policy.current
    if state.spec.algorithm.keep_best and current.weights is not None:
        best = msgspec.structs.replace(best, weights=current.weights, adapter=current.adapter)
        turn.emit(CommitBestPolicy(job=state.job, policy=current, mean=best.mean))
    turn.set_policy(best=best)
    if before is not None:
        blob_retention.discard(turn, before.weights, before.adapter)


def _scored(state: RunState, evaluated: RolloutBatch) -> BestPolicy | None:
    """Return None if no answer has a reward."""
    version = state.policy.version
    if _is_of_earlier_version(state):
        rewards = evaluated.rewards()
        mean = sum(rewards) / len(rewards) if rewards else None
        return None if mean is None else BestPolicy(version=version, mean=mean)
    means = prompt_means(split_into_sets(state, evaluated))
    mean = mean_over_sets(means)
    return None if mean is None else BestPolicy(version=version, mean=mean, prompt_means=means)


def _is_better(state: RunState, before: BestPolicy, after: BestPolicy) -> bool:
    if _is_of_earlier_version(state):
        return after.mean > before.mean
    difference = compare(before.prompt_means, after.prompt_means)
    confidence = state.spec.algorithm.keep_best_confidence
    low = -math.inf if difference is None else difference.low(confidence)
    return low > 0.0


def _is_of_earlier_version(state: RunState) -> bool:
    """Return True for a journal whose best weights were kept by the mean over answers."""
    return any(each.name == "" for each in state.eval_sets)
