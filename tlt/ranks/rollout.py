"""Decode a rank's prompts: prompts become requests, completions become `RolloutFinished`."""

from collections.abc import Mapping

import msgspec
import torch

from tlt.base.id_types import PolicyVersion, Purpose, Step
from tlt.base.strategies import Ngram
from tlt.blobs.answer_files import Answer, pack_logprobs, pack_origins, pack_tokens, unpack_tokens
from tlt.engine.base import Completion, Engine, NoiseKey, Request, Sampling
from tlt.errors import BlobError
from tlt.models.safetensors_io import read_weights
from tlt.models.tokenizer import Tokenizer
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import DecodingReported, RolloutCut, RolloutFinished
from tlt.protocol.rank_messages import PartialAnswer, PartialAnswers, PeerAnswer
from tlt.protocol.refs import AnswerRef, PolicyRef
from tlt.ranks.accepted_counts import count_accepted
from tlt.ranks.drafter.replay_buffer import ReplayBuffer
from tlt.ranks.engine_requirements import context_of
from tlt.ranks.rank_job_context import RankJob
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import EvaluationSet

_SECONDS_BETWEEN_REPORTS = 1.0
# tokens with which an answer is first shared, and growth after which it is shared again
_LEAST_TOKENS, _GROWTH = 8, 1.5
# tokens of a cut answer that are drawn again where a stop string may have begun in them
_OVERLAP = 16


class RolloutDuty:
    """The prompts that this rank answers now."""

    def __init__(
        self,
        job: RankJob,
        engine: Engine,
        tokenizer: Tokenizer,
        replay: ReplayBuffer | None,
    ) -> None:
        """Keep answers in `replay`, if the job trains a drafter, while that may pay."""
        self.engine = engine
        self.version = PolicyVersion(0)
        self._job = job
        self._spec = job.spec
        self._tokenizer = tokenizer
        self._stop_tokens = tokenizer.stop_tokens()
        self._context = context_of(job.spec)
        self._blobs = job.blobs()
        self._answers = job.answers.writer(job.member)
        self._replay = self._all_answers = replay
        self._proposes_ngrams = any(isinstance(arm, Ngram) for arm in job.spec.speculation.arms)
        self._issued: dict[int, PromptIssued] = {}
        # by request: the tokens of an answer that was cut before
        self._prefixes: dict[int, Answer] = {}
        self._next_id = 0
        # by request: token count of the answer when it was last shared
        self._shared: dict[int, int] = {}
        self._reported = 0.0
        self._serial = 0
        # the rollout batch at hand, and False from a cut until the next one
        self._batch: tuple[Step, Purpose] = Step(0), "train"
        self._is_open = True

    def open_batch(self, step: Step, purpose: Purpose) -> None:
        """Count decoding as that of this rollout batch."""
        self._batch = step, purpose
        self._is_open = True

    def submit(self, prompts: tuple[PromptIssued, ...]) -> list[RolloutCut]:
        """Answer these prompts as slots become free; after a cut, give them back at once."""
        if not self._is_open:
            return [self._cut(prompt, prompt.prefix, 0.0) for prompt in prompts]
        requests: list[Request] = []
        for prompt in prompts:
            requests.append(self._request(self._next_id, prompt))
            self._issued[self._next_id] = prompt
            self._next_id += 1
        self.engine.submit(requests)
        return []

    def step(self) -> list[RolloutFinished | RolloutCut]:
        """Make one decode step, and return the answers that it finished."""
        return [self._ended(completion) for completion in self.engine.step()]

    def cut(self) -> list[RolloutFinished | RolloutCut]:
        """Give up the unfinished answers to training prompts, and take no more until a batch."""
        self._is_open = False
        self.engine.cancel([i for i, prompt in self._issued.items() if prompt.purpose == "train"])
        return self.step()

    def report(self, now: float) -> DecodingReported | None:
        """Return how the rank decoded since the last report, if another one is due."""
        if now < self._reported + _SECONDS_BETWEEN_REPORTS and self.engine.running:
            return None
        tallies = self.engine.take_strategy_tallies()
        if not tallies or not self._spec.speculation.arms:
            return None
        self._reported = now
        self._serial += 1
        step, purpose = self._batch
        return DecodingReported(
            **self._job.reporter,
            rank=self._job.setup.rank,
            serial=self._serial,
            step=step,
            purpose=purpose,
            tallies=tallies,
        )

    def keep_answers(self, keep: bool) -> None:
        """Keep answers and hidden states for drafter training from now on, or don't."""
        self._replay = self._all_answers if keep else None
        self.engine.set_capturing(self._replay is not None)

    def add_answer(self, answer: PeerAnswer | PartialAnswer) -> None:
        """Use another rank's answer for drafter training, and a whole one for n-grams too."""
        if self._replay is None and not self._proposes_ngrams:
            return
        if isinstance(answer, PartialAnswer):
            prompt, tokens = answer.prompt_tokens, unpack_tokens(answer.token_bytes)
        else:
            try:
                found = self._job.answers.read(answer.answer)
            except BlobError:
                return  # its folder isn't mounted here; only proposals are worse without it
            prompt, tokens = found.prompt, found.tokens
            self.engine.index_answer(prompt, tokens)
        if self._replay is not None:
            origin = "others" if isinstance(answer, PeerAnswer) else "unfinished"
            self._replay.add(origin, self._key(answer), prompt, tokens)

    def partial_answers(self) -> PartialAnswers:
        """Return the answers that have grown by half since they were last shared.

        The growth by a factor bounds what is copied to three times the final answer.
        """
        answers: list[PartialAnswer] = []
        for id_, prompt in self._issued.items():
            tokens = self.engine.partial_answer(id_) if prompt.purpose == "train" else None
            if tokens and id_ in self._prefixes:
                tokens = [*self._prefixes[id_].tokens, *tokens]
            if tokens and len(tokens) >= max(_LEAST_TOKENS, _GROWTH * self._shared.get(id_, 0)):
                self._shared[id_] = len(tokens)
                if self._replay is not None:
                    self._replay.share_partial(self._key(prompt), self.engine.hidden_states(id_))
                answers.append(
                    PartialAnswer(
                        job=prompt.job,
                        step=prompt.step,
                        purpose=prompt.purpose,
                        prompt=prompt.prompt,
                        member=prompt.member,
                        prompt_tokens=prompt.tokens,
                        token_bytes=pack_tokens(tokens),
                    )
                )
        return PartialAnswers(job=self._job.id, answers=tuple(answers))

    def use_policy(self, policy: PolicyRef) -> None:
        """Decode with this policy; a version that is loaded already costs nothing."""
        if policy.version == self.version or policy.weights is None:
            return
        self.swap_weights(policy.version, read_weights(self._blobs, policy.weights))

    def swap_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        """Decode with these weights."""
        self.engine.swap_weights(version, weights)
        self.version = version

    def _request(self, id_: int, prompt: PromptIssued) -> Request:
        prefix = self._read_prefix(prompt)
        if prefix is not None:
            self._prefixes[id_] = prefix
        tokens = () if prefix is None else tuple(prefix.tokens)
        most = min(most_tokens(self._spec, prompt), self._context - len(prompt.tokens))
        return Request(
            id=id_,
            prompt=(*prompt.tokens, *tokens),
            key=self._key(prompt),
            sampling=sampling(self._spec, prompt),
            max_new_tokens=most - len(tokens),
            stop_tokens=self._stop_tokens,
            stop_strings=tuple(self._spec.rollout.stop),
        )

    def _read_prefix(self, prompt: PromptIssued) -> Answer | None:
        """Return the tokens to go on with; an answer that can't be read here begins anew."""
        if prompt.prefix is None:
            return None
        try:
            prefix = self._job.answers.read(prompt.prefix)
        except BlobError:
            return None
        # the engine finds no stop string that began before its first token
        return prefix.first(len(prefix.tokens) - (_OVERLAP if self._spec.rollout.stop else 0))

    def _key(self, about: PromptIssued | PeerAnswer | PartialAnswer) -> NoiseKey:
        """Use the same noise in every evaluation, so that policies differ and luck doesn't."""
        return NoiseKey(
            seed=self._spec.seed,
            step=about.step if about.purpose == "train" else Step(0),
            purpose=about.purpose,
            prompt=about.prompt,
            member=about.member,
        )

    def _ended(self, completion: Completion) -> RolloutFinished | RolloutCut:
        prompt = self._issued.pop(completion.id)
        self._shared.pop(completion.id, None)
        prefix = self._prefixes.pop(completion.id, None)
        is_cut = completion.stop == "cancelled"
        if is_cut and not completion.tokens:
            return self._cut(prompt, prompt.prefix, 0.0)
        if prefix is not None:
            completion = _joined(prefix, completion, self._tokenizer)
        if is_cut:
            answer = self._answers.append(_answer(self._spec, prompt, completion))
            return self._cut(prompt, answer, completion.decode_seconds)
        return self._finished(prompt, completion)

    def _cut(
        self, prompt: PromptIssued, answer: AnswerRef | None, decode_seconds: float
    ) -> RolloutCut:
        return RolloutCut(
            **self._job.reporter,
            epoch=prompt.epoch,
            step=prompt.step,
            attempt=prompt.attempt,
            purpose=prompt.purpose,
            prompt=prompt.prompt,
            member=prompt.member,
            answer=answer,
            decode_seconds=decode_seconds,
            excused=prompt.excused,
        )

    def _finished(self, prompt: PromptIssued, completion: Completion) -> RolloutFinished:
        if self._replay is not None:
            self._replay.add(
                "own",
                self._key(prompt),
                prompt.tokens,
                completion.tokens,
                lambda: self.engine.hidden_states(completion.id),
            )
        return RolloutFinished(
            **self._job.reporter,
            epoch=prompt.epoch,
            step=prompt.step,
            attempt=prompt.attempt,
            purpose=prompt.purpose,
            prompt=prompt.prompt,
            member=prompt.member,
            answer=self._answers.append(_answer(self._spec, prompt, completion)),
            length=len(completion.tokens),
            accepted=count_accepted(completion.origins, completion.drafters),
            batch=completion.batches[-1].size if completion.batches else 0,
            decode_seconds=completion.decode_seconds,
            stop=completion.stop,
            prompt_length=len(prompt.tokens),
            retractions=completion.retractions,
        )


def _joined(prefix: Answer, completion: Completion, tokenizer: Tokenizer) -> Completion:
    """Return the whole of an answer that was cut."""
    tokens = [*prefix.tokens, *completion.tokens]
    return msgspec.structs.replace(
        completion,
        tokens=tokens,
        logprobs=[*prefix.logprobs, *completion.logprobs],
        text=tokenizer.decode(tokens),
        policies=(*prefix.policies, *completion.policies),
        drafters=(*prefix.drafters, *completion.drafters),
        origins=(*prefix.origins, *completion.origins),
        batches=(*prefix.batches, *completion.batches),
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
