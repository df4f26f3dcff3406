"""The figures of an evaluation: avg@k, pass@k and maj@k of each set of held-out prompts.

A prompt counts once, however many answers it has. Answers without a reward are left out.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from tlt.base.id_types import PolicyVersion, Step
from tlt.policies.run.evaluation_answers import PromptMeans, mean_over_sets, mean_reward
from tlt.policies.run.policy_comparison import compare
from tlt.protocol.shared_values import EvaluationAnswer, SetAnswers
from tlt.report.batch_lengths_and_finish_times import LengthSummary
from tlt.report.statistics import mean, standard_error
from tlt.spec.data_and_algorithm import ONE_SET

_CONFIDENCE = 0.95
Prompt = Sequence[EvaluationAnswer]


class SetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation's figures on one set."""

    name: str
    # prompts of which an answer has a reward
    problems: int
    # answers to each prompt: the k of avg@k and maj@k
    answers: int
    # avg@k: the mean over prompts of the mean reward of a prompt's answers
    mean: float
    # of that mean, over prompts
    stderr: float
    # by k: the expected share of prompts to which one of k answers is right
    pass_at: dict[int, float]
    # maj@k: the share of prompts whose most frequent final answer is right; None with one answer
    # to each prompt, and where no verifier extracts final answers
    majority: float | None
    length: LengthSummary
    # share of the answers that hit a limit of tokens
    truncated: float
    # answers without a reward: dropped, not scored, or left out by the reward
    unscored: int
    # prompts that were left out, because they are too long
    skipped: int

    def describe(self) -> str:
        parts = [f"avg@{self.answers} {self.mean:.3f} ± {self.stderr:.3f}"]
        if self.answers > 1:
            parts += [f"pass@{k} {share:.3f}" for k, share in list(self.pass_at.items())[-1:]]
        if self.majority is not None:
            parts.append(f"maj@{self.answers} {self.majority:.3f}")
        return f"{', '.join(parts)} on {self.problems} problems"


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """The difference to the first evaluation, prompt by prompt, with its 95 % interval."""

    value: float
    low: float | None
    high: float | None

    def describe(self) -> str:
        points = f"{100 * self.value:+.1f} points"
        if self.low is None or self.high is None:
            return points
        return f"{points} (95 %: {100 * self.low:+.1f} to {100 * self.high:+.1f})"


class EvalSummary(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    version: PolicyVersion
    # over the sets, each of which counts the same
    mean: float
    stderr: float
    # of all sets
    problems: int
    length: LengthSummary
    seconds: float
    reward_parts: dict[str, float] = {}
    sets: tuple[SetFigures, ...] = ()
    # None in the first evaluation
    gain: Gain | None = None

    def describe_score(self) -> str:
        count = f", {len(self.sets)} sets" if len(self.sets) > 1 else ""
        return f"{self.mean:.3f} ± {self.stderr:.3f} on {self.problems} problems{count}"

    def describe_sets(self) -> str:
        """Describe what the overall score does not say; empty for a set with one answer each."""
        if len(self.sets) == 1 and self.sets[0].answers == 1:
            return ""
        return "; ".join(f"{each.name} {each.describe()}" for each in self.sets)


def set_figures(answers: SetAnswers, *, extracts: bool) -> SetFigures:
    """Compute the figures of a set; `extracts` says that a verifier extracts final answers."""
    each = [answer for prompt in answers.prompts for answer in prompt]
    most = max(map(len, answers.prompts), default=0)
    means = [value for prompt in answers.prompts if (value := mean_reward(prompt)) is not None]
    lengths = [answer.length for answer in each if answer.length]
    return SetFigures(
        # journals of versions that knew a single set don't name it
        name=answers.name or ONE_SET,
        problems=len(means),
        answers=most,
        mean=mean(means),
        stderr=standard_error(means),
        pass_at={
            k: share for k in _powers(most) if (share := _pass_at(answers.prompts, k)) is not None
        },
        majority=_majority(answers.prompts) if extracts and most > 1 else None,
        length=LengthSummary.of(lengths),
        truncated=sum(answer.truncated for answer in each) / max(1, len(each)),
        unscored=sum(answer.reward is None for answer in each),
        skipped=answers.skipped,
    )


def overall(sets: Sequence[SetFigures], means: PromptMeans) -> tuple[float, float]:
    """Return the mean over sets and its standard error."""
    scored = [each.stderr for each in sets if each.problems]
    error = math.sqrt(math.fsum(stderr**2 for stderr in scored)) / max(1, len(scored))
    return mean_over_sets(means) or 0.0, error


def gain_over(first: PromptMeans, means: PromptMeans) -> Gain | None:
    difference = compare(first, means)
    if difference is None:
        return None
    low, high = difference.interval(_CONFIDENCE)
    known = math.isfinite(low)
    return Gain(value=difference.value, low=low if known else None, high=high if known else None)


def pass_at_k(answers: int, correct: int, k: int) -> float:
    """Return the chance that one of k answers is right, if k of these are drawn without return."""
    return 1.0 - math.comb(answers - correct, k) / math.comb(answers, k)


def majority_vote(prompt: Prompt) -> float:
    """Return 1 if the most frequent final answer is right, else 0.

    Of several that are as frequent each counts its share. Answers without one don't vote.
    """
    votes: defaultdict[str, list[bool]] = defaultdict(list)
    for answer in prompt:
        if answer.final is not None and answer.reward is not None:
            votes[answer.final].append(answer.correct)
    most = max(map(len, votes.values()), default=0)
    return mean([mean(correct) for correct in votes.values() if len(correct) == most])


def _pass_at(prompts: Sequence[Prompt], k: int) -> float | None:
    """Return the mean over the prompts that have as many answers with a reward."""
    counts = [
        (len(scored), sum(answer.correct for answer in scored))
        for prompt in prompts
        if len(scored := _scored(prompt)) >= k
    ]
    return mean([pass_at_k(n, correct, k) for n, correct in counts]) if counts else None


def _majority(prompts: Sequence[Prompt]) -> float:
    return mean([majority_vote(prompt) for prompt in prompts if _scored(prompt)])


def _scored(prompt: Prompt) -> list[EvaluationAnswer]:
    return [answer for answer in prompt if answer.reward is not None]


def _powers(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on up to `most`, and that."""
    k = 1
    while k < most:
        yield k
        k *= 2
    if most:
        yield most
