"""Write answers to the rank's file, and make the events that report them; cut ones go on later."""

import msgspec

from tlt.base.id_types import Step
from tlt.blobs.answer_files import Answer, pack_logprobs, pack_origins, pack_tokens
from tlt.engine.base import Completion, NoiseKey, Sampling
from tlt.errors import BlobError
from tlt.models.tokenizer import Tokenizer
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import RolloutCut, RolloutFinished
from tlt.protocol.rank_messages import PartialAnswer, PeerAnswer
from tlt.ranks.accepted_counts import count_accepted
from tlt.ranks.rank_job_context import RankJob
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import EvaluationSet

# tokens of a cut answer that are drawn again where a stop string may have begun in them
_OVERLAP = 16


class AnswerEvents:
    def __init__(self, job: RankJob, tokenizer: Tokenizer) -> None:
        self._spec = job.spec
        self._reporter = job.reporter
        self._tokenizer = tokenizer
        self._files = job.answers
        self._writer = job.answers.writer(job.member)

    def read_prefix(self, prompt: PromptIssued) -> Answer | None:
        """Return the tokens to go on with; an answer that can't be read here begins anew."""
        if prompt.prefix is None:
            return None
        try:
            prefix = self._files.read(prompt.prefix)
        except BlobError:
            return None
        # the engine finds no stop string that began before its first token
        return prefix.first(len(prefix.tokens) - (_OVERLAP if self._spec.rollout.stop else 0))

    def join(self, prefix: Answer, completion: Completion) -> Completion:
        """Return the whole of an answer that was cut."""
        tokens = [*prefix.tokens, *completion.tokens]
        return msgspec.structs.replace(
            completion,
            tokens=tokens,
            logprobs=[*prefix.logprobs, *completion.logprobs],
            text=self._tokenizer.decode(tokens),
            policies=(*prefix.policies, *completion.policies),
            drafters=(*prefix.drafters, *completion.drafters),
            origins=(*prefix.origins, *completion.origins),
            batches=(*prefix.batches, *completion.batches),
        )

    def finished(self, prompt: PromptIssued, completion: Completion) -> RolloutFinished:
        return RolloutFinished(
            **self._reporter,
            epoch=prompt.epoch,
            step=prompt.step,
            attempt=prompt.attempt,
            purpose=prompt.purpose,
            prompt=prompt.prompt,
            member=prompt.member,
            answer=self._writer.append(_answer(self._spec, prompt, completion)),
            length=len(completion.tokens),
            accepted=count_accepted(completion.origins, completion.drafters),
            batch=completion.batches[-1].size if completion.batches else 0,
            decode_seconds=completion.decode_seconds,
            stop=completion.stop,
            prompt_length=len(prompt.tokens),
            retractions=completion.retractions,
        )

    def cut(
        self,
        prompt: PromptIssued,
        completion: Completion | None = None,
        prefix: Answer | None = None,
    ) -> RolloutCut:
        """Report an unfinished answer, with the tokens that it had if it has no new ones."""
        answer, seconds = prompt.prefix, 0.0
        # nothing goes on with an answer of a group that is put off
        kept = not self._spec.rollout.defer_long
        if completion is not None and completion.tokens and kept:
            seconds = completion.decode_seconds
            whole = completion if prefix is None else self.join(prefix, completion)
            answer = self._writer.append(_answer(self._spec, prompt, whole))
        return RolloutCut(
            **self._reporter,
            epoch=prompt.epoch,
            step=prompt.step,
            attempt=prompt.attempt,
            purpose=prompt.purpose,
            prompt=prompt.prompt,
            member=prompt.member,
            answer=answer,
            decode_seconds=seconds,
            excused=prompt.excused,
        )


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


def most_tokens(spec: JobSpec, prompt: PromptIssued) -> int:
    """Return the limit of an answer, as long as the context has room for it."""
    own = _set_of(spec, prompt)
    return (own and own.max_new_tokens) or spec.rollout.max_new_tokens


def _set_of(spec: JobSpec, prompt: PromptIssued) -> EvaluationSet | None:
    return None if prompt.set is None else spec.data.evaluation_sets.get(prompt.set)


def _answer(spec: JobSpec, prompt: PromptIssued, completion: Completion) -> Answer:
    drawn = sampling(spec, prompt)
    return Answer(
        prompt=prompt.tokens,
        token_bytes=pack_tokens(completion.tokens),
        logprob_bytes=pack_logprobs(completion.logprobs),
        text=completion.text,
        temperature=drawn.temperature,
        top_k=drawn.top_k,
        top_p=drawn.top_p,
        min_p=drawn.min_p,
        policies=completion.policies,
        drafters=completion.drafters,
        origin_bytes=pack_origins(completion.origins),
        batches=completion.batches,
    )
