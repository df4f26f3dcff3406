"""Decode a rank's prompts: prompts become requests, completions become `RolloutFinished`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tlt.base.id_types import PolicyVersion, Purpose, Step
from tlt.base.strategies import Ngram
from tlt.blobs.answer_files import Answer, pack_tokens, unpack_tokens
from tlt.engine.base import Completion, Engine, Request
from tlt.errors import BlobError
from tlt.models.chat_turns import TurnRenderer
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.safetensors_io import read_weights
from tlt.models.tokenizer import Tokenizer
from tlt.protocol.commands import PromptIssued, StartRollout
from tlt.protocol.events import DecodingReported, RolloutCut, RolloutFinished
from tlt.protocol.rank_messages import (
    EndTrajectory,
    PartialAnswer,
    PartialAnswers,
    PeerAnswer,
    TurnFinished,
)
from tlt.protocol.refs import PolicyRef
from tlt.ranks.answer_events import AnswerEvents
from tlt.ranks.drafter.replay_buffer import ReplayBuffer
from tlt.ranks.engine_requirements import engine_dtype
from tlt.ranks.rank_job_context import RankJob
from tlt.ranks.request_settings import RequestSettings, noise_key
from tlt.ranks.trajectories import Trajectories

_SECONDS_BETWEEN_REPORTS = 1.0
# tokens with which an answer is first shared, and growth after which it is shared again
_LEAST_TOKENS, _GROWTH = 8, 1.5


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
        self._requests = RequestSettings(job.spec, tokenizer)
        self._events = AnswerEvents(job, tokenizer)
        self._replay = self._all_answers = replay
        self._proposes_ngrams = any(isinstance(arm, Ngram) for arm in job.spec.speculation.arms)
        self._issued: dict[int, PromptIssued] = {}
        # by request: the tokens of an answer that was cut before
        self._prefixes: dict[int, Answer] = {}
        self.trajectories = Trajectories(
            engine,
            self._requests,
            TurnRenderer(tokenizer, job.spec.data),
            self._events,
            self._request,
            reports_tokens=bool(job.spec.environment) and job.spec.environment.is_agent,
        )
        self._next_id = 0
        # by request: token count of the answer when it was last shared
        self._shared: dict[int, int] = {}
        self._reported = 0.0
        self._serial = 0
        # the rollout batch at hand, and False from a cut until the next one
        self._batch: tuple[Step, Purpose] = Step(0), "train"
        self._is_open = True

    def start(self, command: StartRollout) -> None:
        """Take prompts of a rollout batch; a policy that is loaded already costs nothing."""
        if command.policy.version != self.version:
            self.swap_weights(command.policy.version, _read_policy(self._job, command.policy))
        self._batch = command.step, command.purpose
        self._is_open = self.trajectories.is_open = True
        self.trajectories.step = command.step
        self._replay = self._all_answers if command.keep_answers else None
        self.engine.set_capturing(self._replay is not None)

    def submit(self, prompts: tuple[PromptIssued, ...]) -> list[RolloutCut]:
        """Answer these prompts as slots become free; give those of other weights back at once."""
        # a step has weights of its own
        apart = self._spec.algorithm.staleness > 0
        refused: list[PromptIssued] = []
        requests: list[Request] = []
        for prompt in prompts:
            other = apart and (prompt.step, prompt.purpose) != self._batch
            if other or not self._is_open:
                refused.append(prompt)
                continue
            prefix = self._events.read_prefix(prompt)
            tokens = () if prefix is None else prefix.tokens
            most = self._requests.most_tokens(prompt) - len(tokens)
            requests.append(self._request(prompt, tokens, most, 0))
            if prefix is not None:
                self._prefixes[requests[-1].id] = prefix
        self.engine.submit(requests)
        return [self._events.cut(prompt) for prompt in refused]

    def end(self, message: EndTrajectory) -> list[RolloutFinished]:
        """Report an answer that the environment has judged."""
        trajectory = self.trajectories.end(message)
        if trajectory is None:
            return []
        if self._replay is not None:
            first = trajectory.branches[0]
            key = noise_key(self._spec, trajectory.prompt)
            self._replay.add("own", key, first.prompt, first.tokens)
        return [self._events.judged(trajectory, message)]

    def step(self) -> list[RolloutFinished | RolloutCut | TurnFinished]:
        """Make one decode step, and return the answers that it finished."""
        return [self._ended(completion) for completion in self.engine.step()]

    def cut(self) -> list[RolloutFinished | RolloutCut | TurnFinished]:
        """Give up the unfinished answers to training prompts, and take no more until a batch."""
        self._is_open = self.trajectories.is_open = False
        waiting = self.trajectories.give_up()
        self.engine.cancel([i for i, prompt in self._issued.items() if prompt.purpose == "train"])
        return [*waiting, *self.step()]

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
            self._replay.add(origin, noise_key(self._spec, answer), prompt, tokens)

    def partial_answers(self) -> PartialAnswers:
        """Return the answers that have grown by half since they were last shared.

        The growth by a factor bounds what is copied to three times the final answer.
        """
        answers: list[PartialAnswer] = []
        for id_, prompt in self._issued.items():
            # what is shared of an answer is its first conversation
            shared = prompt.purpose == "train" and self.trajectories.branch_of(id_) == 0
            tokens = self.engine.partial_answer(id_) if shared else None
            if tokens and id_ in self._prefixes:
                tokens = [*self._prefixes[id_].tokens, *tokens]
            elif tokens:
                tokens = [*self.trajectories.tokens_before(id_), *tokens]
            if tokens and len(tokens) >= max(_LEAST_TOKENS, _GROWTH * self._shared.get(id_, 0)):
                self._shared[id_] = len(tokens)
                if self._replay is not None:
                    self._replay.share_partial(
                        noise_key(self._spec, prompt), self.engine.hidden_states(id_)
                    )
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

    def swap_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        """Decode with these weights."""
        self.engine.swap_weights(version, weights)
        self.version = version

    def _request(
        self, prompt: PromptIssued, tokens: Sequence[int], most: int, branch: int
    ) -> Request:
        """Ask for at most so many tokens that follow these."""
        id_, self._next_id = self._next_id, self._next_id + 1
        self._issued[id_] = prompt
        if tokens:
            self._shared[id_] = len(tokens)
        return self._requests.request(id_, prompt, (*prompt.tokens, *tokens), most, branch)

    def _ended(self, completion: Completion) -> RolloutFinished | RolloutCut | TurnFinished:
        prompt = self._issued.pop(completion.id)
        self._shared.pop(completion.id, None)
        prefix = self._prefixes.pop(completion.id, None)
        if (turn := self.trajectories.end_turn(completion)) is not None:
            return turn
        if completion.stop == "cancelled":
            return self._events.cut(prompt, completion, prefix)
        if prefix is not None:
            completion = self._events.join(prefix, completion)
        if self._replay is not None:
            self._replay.add(
                "own",
                noise_key(self._spec, prompt),
                prompt.tokens,
                completion.tokens,
                lambda: self.engine.hidden_states(completion.id),
            )
        return self._events.finished(prompt, completion)


def _read_policy(job: RankJob, policy: PolicyRef) -> Mapping[str, torch.Tensor]:
    if policy.weights is not None:
        return read_weights(job.blobs(), policy.weights)
    # the job began with them
    return load_decoder(Path(job.spec.policy.path), engine_dtype(job.spec, job.device)).weights
