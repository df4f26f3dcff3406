"""Score lists of requests with a spec's reward; what user code raises is a result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec

from tlt.base.id_types import LARGEST
from tlt.data.thoughts import text_after_thoughts
from tlt.errors import ConfigError
from tlt.isolation.error_text import describe
from tlt.rewards.kinds.reward_functions import RewardFunction, load_function
from tlt.rewards.kinds.reward_model_folder import read_folder
from tlt.rewards.kinds.verifiers import load_extractor, load_verifier
from tlt.rewards.reward_messages import ScoreRequest, ScoreResult
from tlt.spec.reward import RewardSpec


@dataclass(frozen=True)
class RequestScorer:
    score: Callable[[Sequence[ScoreRequest]], list[ScoreResult]]
    # what it wants to know beside completion, answer and row
    wanted: frozenset[str] = frozenset()
    # it scores several answers in one call
    batched: bool = False


def load_scorer(spec: RewardSpec) -> RequestScorer:
    """Raise ConfigError if the reward can't be had."""
    if spec.kind == "function":
        function = load_function(spec.function or "")
        wanted = frozenset(function.wanted.values())
        if function.batched:
            return RequestScorer(lambda some: _score_together(function, some), wanted, batched=True)
        return RequestScorer(lambda some: [_score_one(function, each) for each in some], wanted)
    if spec.kind == "model":
        return _model_scorer(spec)
    if spec.kind == "url":
        judge = load_verifier(spec)
        return RequestScorer(
            lambda some: [_guarded(partial(judge, r.completion, r.answer, r.row)) for r in some]
        )
    return _verifier_scorer(spec)


def _verifier_scorer(spec: RewardSpec) -> RequestScorer:
    """Judge what an answer says after its thought; one whose thought doesn't end is wrong."""
    verifier, extract = load_verifier(spec), load_extractor(spec)

    def judge(request: ScoreRequest) -> ScoreResult:
        in_thought = bool(request.known.get("in_thought"))
        text = text_after_thoughts(request.completion, in_thought=in_thought)
        if text is None:
            return ScoreResult(reward=0.0)
        result = _guarded(partial(verifier, text, request.answer, request.row))
        if not request.extract or extract is None or result.error is not None:
            return result
        return msgspec.structs.replace(result, final=_extracted(extract, text))

    return RequestScorer(lambda some: [judge(each) for each in some], frozenset({"in_thought"}))


def _extracted(extract: Callable[[str], str | None], text: str) -> str | None:
    """Return None where the extraction stumbles over what a model wrote."""
    try:
        return extract(text)
    except Exception:  # the answer has been judged all the same
        return None


def _model_scorer(spec: RewardSpec) -> RequestScorer:
    """Check the folder now, and load the model in the process that scores.

    A process that has used torch's threads or CUDA can't be forked.
    """
    read_folder(spec)

    @cache
    def load() -> Any:
        from tlt.rewards.kinds.reward_model import RewardModel

        return RewardModel(spec)

    def score(requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        try:
            model = load()
        except ConfigError as error:
            return [ScoreResult(error=str(error))] * len(requests)
        return model.score(requests)

    return RequestScorer(score, frozenset({"prompt"}), batched=True)


def _unknown(function: RewardFunction, request: ScoreRequest) -> ScoreResult | None:
    """Return the error of a function that takes what only a job knows."""
    missing = [name for name in function.wanted.values() if name not in request.known]
    return ScoreResult(error=f"only a job knows the '{missing[0]}' it takes") if missing else None


def _score_one(function: RewardFunction, request: ScoreRequest) -> ScoreResult:
    if (unknown := _unknown(function, request)) is not None:
        return unknown
    asked = {key: request.known[name] for key, name in function.wanted.items()}
    return _guarded(
        lambda: function.call(
            completion=request.completion, answer=request.answer, row=request.row, **asked
        )
    )


def _score_together(
    function: RewardFunction, requests: Sequence[ScoreRequest]
) -> list[ScoreResult]:
    if (unknown := _unknown(function, requests[0])) is not None:
        return [unknown] * len(requests)
    asked: Mapping[str, list[Any]] = {
        key: [request.known[name] for request in requests] for key, name in function.wanted.items()
    }
    try:
        found = list(
            function.call(
                completions=[request.completion for request in requests],
                answers=[request.answer for request in requests],
                rows=[request.row for request in requests],
                **asked,
            )
        )
    except Exception as error:  # raised by the user's code
        return [ScoreResult(error=describe(error, "reward"))] * len(requests)
    if len(found) != len(requests):
        error = f"{len(found)} rewards for {len(requests)} answers"
        return [ScoreResult(error=error)] * len(requests)
    return [_guarded(lambda value=value: value) for value in found]


def _guarded(compute: Callable[[], Any]) -> ScoreResult:
    try:
        value = compute()
        if value is None:
            return ScoreResult()
        reward = float(value)
    except Exception as error:  # raised by the user's code
        return ScoreResult(error=describe(error, "reward"))
    if not abs(reward) <= LARGEST:  # NaN isn't either
        return ScoreResult(error=f"the reward is {reward}")
    return ScoreResult(reward=reward)
