"""Decode a rank's prompts: prompts become requests, completions become `RolloutFinished`."""

import numpy as np
import torch

from tlt.config import JobSpec
from tlt.engine.base import Completion, Engine, NoiseKey, Request, Sampling
from tlt.errors import BlobError
from tlt.ids import PolicyVersion, Purpose, Step
from tlt.models.safetensors_io import read_weights
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import DecodingReported, RolloutFinished
from tlt.protocol.rank_messages import PartialAnswers, PeerAnswer
from tlt.protocol.refs import PolicyRef, Tensor
from tlt.ranks.engine_factory import context_of
from tlt.ranks.rank_job import RankJob
from tlt.ranks.replay_buffer import ReplayBuffer

_SECONDS_BETWEEN_REPORTS = 1.0
# tokens of an answer before others may learn from it, and by how much it grows before they do again
_LEAST_GROWN, _GROWN = 8, 1.5


class RolloutDuty:
    def __init__(
        self,
        job: RankJob,
        engine: Engine,
        stop_tokens: frozenset[int],
        pool: ReplayBuffer | None,
    ) -> None:
        """`pool`: where answers are kept that a drafter may learn from."""
        self.engine = engine
        self.version = PolicyVersion(0)
        self._job = job
        self._spec = job.spec
        self._stop_tokens = stop_tokens
        self._context = context_of(job.spec)
        self._blobs = job.blobs()
        self._pool = pool
        self._issued: dict[int, PromptIssued] = {}
        self._next_id = 0
        # of answers that are being written: how long they were when others were told
        self._shared: dict[int, int] = {}
        self._said = 0.0
        # how often it has said how it decodes, and what the prompts in hand are for
        self._serial = 0
        self._round: tuple[Step, Purpose] = Step(0), "train"

    def submit(self, prompts: tuple[PromptIssued, ...]) -> None:
        requests: list[Request] = []
        for prompt in prompts:
            requests.append(self._request(self._next_id, prompt))
            self._issued[self._next_id] = prompt
            self._next_id += 1
        self.engine.submit(requests)
        self._round = prompts[-1].step, prompts[-1].purpose

    def step(self) -> list[RolloutFinished]:
        return [self._finished(completion) for completion in self.engine.step()]

    def report(self, now: float) -> DecodingReported | None:
        """How it decoded lately, if that is worth saying again."""
        if now < self._said + _SECONDS_BETWEEN_REPORTS and self.engine.running:
            return None
        tallies = self.engine.take_strategy_tallies()
        if not tallies or not self._spec.speculation.arms:
            return None
        self._said = now
        self._serial += 1
        step, purpose = self._round
        return DecodingReported(
            **self._job.reporter,
            rank=self._job.setup.rank,
            serial=self._serial,
            step=step,
            purpose=purpose,
            tallies=tallies,
        )

    def overhear(self, answer: PeerAnswer) -> None:
        try:
            tokens = self._blobs.unpack(answer.tokens).tolist()
        except BlobError:
            return  # its step is over, and with it what held the tokens
        if answer.whole:
            self.engine.index_answer(answer.prompt_tokens, tokens)
        if self._pool is not None:
            origin = "others" if answer.whole else "running"
            self._pool.add(origin, self._key(answer), answer.prompt_tokens, tokens)

    def growing(self) -> PartialAnswers:
        """What others, who are idle, may learn from: all that has grown by half since they saw it.

        So all that is ever copied of an answer is three times what it comes to.
        """
        answers: list[PeerAnswer] = []
        for id_, prompt in self._issued.items():
            tokens = self.engine.partial_answer(id_) if prompt.purpose == "train" else None
            if tokens and len(tokens) >= max(_LEAST_GROWN, _GROWN * self._shared.get(id_, 0)):
                self._shared[id_] = len(tokens)
                if self._pool is not None:
                    self._pool.lend(self._key(prompt), self.engine.hidden_states(id_))
                answers.append(
                    PeerAnswer(
                        job=prompt.job,
                        step=prompt.step,
                        purpose=prompt.purpose,
                        prompt=prompt.prompt,
                        member=prompt.member,
                        prompt_tokens=prompt.tokens,
                        # a hint, which nobody would release
                        tokens=Tensor(
                            dtype="int32",
                            shape=(len(tokens),),
                            data=np.asarray(tokens, dtype=np.int32).tobytes(),
                        ),
                        whole=False,
                    )
                )
        return PartialAnswers(job=self._job.id, answers=tuple(answers))

    def swap(self, policy: PolicyRef) -> None:
        """Versions that are held already cost nothing."""
        if policy.version == self.version or policy.weights is None:
            return
        self.adopt(policy.version, read_weights(self._blobs, policy.weights))

    def adopt(self, version: PolicyVersion, weights: "dict[str, torch.Tensor]") -> None:
        self.engine.swap_weights(version, weights)
        self.version = version

    def _request(self, id_: int, prompt: PromptIssued) -> Request:
        rollout = self._spec.rollout
        return Request(
            id=id_,
            prompt=prompt.tokens,
            key=self._key(prompt),
            sampling=sampling(self._spec, prompt.purpose),
            max_new_tokens=min(rollout.max_new_tokens, self._context - len(prompt.tokens)),
            stop_tokens=self._stop_tokens,
            stop_strings=tuple(rollout.stop),
        )

    def _key(self, about: PromptIssued | PeerAnswer) -> NoiseKey:
        return NoiseKey(
            seed=self._spec.seed,
            step=about.step,
            purpose=about.purpose,
            prompt=about.prompt,
            member=about.member,
        )

    def _finished(self, completion: Completion) -> RolloutFinished:
        prompt = self._issued.pop(completion.id)
        self._shared.pop(completion.id, None)
        drawn = sampling(self._spec, prompt.purpose)
        if self._pool is not None and completion.stop != "cancelled":
            self._pool.add(
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
            prompt_tokens=prompt.tokens,
            tokens=self._blobs.pack(np.asarray(completion.tokens, dtype=np.int32)),
            logprobs=self._blobs.pack(np.asarray(completion.logprobs, dtype=np.float32)),
            text=completion.text,
            temperature=drawn.temperature,
            top_k=drawn.top_k,
            top_p=drawn.top_p,
            min_p=drawn.min_p,
            policies=completion.policies,
            drafters=completion.drafters,
            origins=completion.origins,
            batches=completion.batches,
            decode_seconds=completion.decode_seconds,
            stop=completion.stop,
        )


def sampling(spec: JobSpec, purpose: Purpose) -> Sampling:
    rollout = spec.rollout
    return Sampling(
        temperature=rollout.temperature if purpose == "train" else rollout.eval_temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
    )
