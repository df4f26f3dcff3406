"""Say how the answer to a prompt is drawn: its noise, its filters and its limit."""

from collections.abc import Sequence

from msgspec.structs import replace

from tlt.base.id_types import Step
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.models.tokenizer import Tokenizer
from tlt.protocol.commands import PromptIssued
from tlt.protocol.rank_messages import PartialAnswer, PeerAnswer
from tlt.ranks.engine_requirements import context_of
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import EvaluationSet


class RequestSettings:
    """Makes requests of a job's prompts."""

    def __init__(self, spec: JobSpec, tokenizer: Tokenizer) -> None:
        self.context = context_of(spec)
        self._spec = spec
        self._stop_tokens = tokenizer.stop_tokens()

    def request(
        self,
        id_: int,
        prompt: PromptIssued,
        before: Sequence[int],
        most: int,
        branch: int = 0,
    ) -> Request:
        """Ask for at most so many tokens that follow those before."""
        key = noise_key(self._spec, prompt)
        return Request(
            id=id_,
            prompt=tuple(before),
            key=replace(key, branch=branch) if branch else key,
            sampling=sampling(self._spec, prompt),
            max_new_tokens=min(most, self.context - len(before)),
            stop_tokens=self._stop_tokens,
            stop_strings=tuple(self._spec.rollout.stop),
            goes_on=bool(self._spec.environment),
        )

    def most_tokens(self, prompt: PromptIssued) -> int:
        """Return the limit of an answer, as long as the context has room for it."""
        own = _set_of(self._spec, prompt)
        return (own and own.max_new_tokens) or self._spec.rollout.max_new_tokens


def noise_key(spec: JobSpec, about: PromptIssued | PeerAnswer | PartialAnswer) -> NoiseKey:
    """Use the same noise in every evaluation, so that policies differ and luck doesn't."""
    return NoiseKey(
        seed=spec.seed,
        step=about.step if about.purpose == "train" else Step(0),
        purpose=about.purpose,
        prompt=about.prompt,
        member=about.member,
    )


def sampling(spec: JobSpec, prompt: PromptIssued) -> Sampling:
    """Return how answers to this prompt are sampled."""
    rollout = spec.rollout
    if prompt.purpose == "train":
        return Sampling(
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
        )
    own = _set_of(spec, prompt) or EvaluationSet(path="")
    return Sampling(
        temperature=rollout.eval_temperature if own.temperature is None else own.temperature,
        top_k=rollout.eval_top_k if own.top_k is None else own.top_k,
        top_p=rollout.eval_top_p if own.top_p is None else own.top_p,
        min_p=rollout.eval_min_p if own.min_p is None else own.min_p,
    )


def _set_of(spec: JobSpec, prompt: PromptIssued) -> EvaluationSet | None:
    return None if prompt.set is None else spec.data.evaluation_sets.get(prompt.set)
