"""Write answers of several turns: the policy's tokens, and between them an environment's.

A turn goes on from exactly the tokens before it: only new messages are rendered and tokenised, and
nothing that the policy wrote is left out or written anew.
"""

from collections.abc import Callable, Sequence

import msgspec

from tlt.base.id_types import Member, PromptIndex, Purpose, Step
from tlt.blobs.answer_files import Turn
from tlt.engine.base import Completion, Engine, Request
from tlt.errors import DataError
from tlt.models.chat_turns import TurnRenderer
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import RolloutCut
from tlt.protocol.rank_messages import (
    AboutAnswer,
    BeginTrajectory,
    ContinueTrajectory,
    EndTrajectory,
    TurnFinished,
)
from tlt.protocol.refs import OriginSpan
from tlt.ranks.answer_events import AnswerEvents, Branch, Trajectory
from tlt.ranks.request_settings import RequestSettings

AnswerKey = tuple[Step, Purpose, PromptIndex, Member]


class Trajectories:
    """The answers of several turns that a rank is writing."""

    def __init__(
        self,
        engine: Engine,
        settings: RequestSettings,
        renderer: TurnRenderer,
        events: AnswerEvents,
        make_request: Callable[[PromptIssued, Sequence[int], int, int], Request],
        reports_tokens: bool,
    ) -> None:
        """Report the tokens of turns, which an agent may ask for, if `reports_tokens`."""
        # False from a cut until the next rollout batch, which is of this step
        self.is_open = True
        self.step = Step(0)
        self._engine = engine
        self._settings = settings
        self._renderer = renderer
        self._events = events
        self._make_request = make_request
        self._reports_tokens = reports_tokens
        # by request: those whose turn the engine writes
        self._writing: dict[int, Trajectory] = {}
        # those that wait for the environment
        self._waiting: dict[AnswerKey, Trajectory] = {}

    def begin(self, message: BeginTrajectory) -> list[RolloutCut | TurnFinished]:
        """Write a conversation's first turn; after a cut, give its prompt back at once."""
        prompt = message.prompt
        trajectory = self._waiting.pop(_key(prompt), None)
        if message.branch == 0:
            is_late = prompt.purpose == "train" and prompt.step < self.step
            if is_late or not self.is_open:
                return [self._events.cut(prompt)]
            trajectory = Trajectory(prompt, [])
        if trajectory is None:
            return []
        trajectory.branches.append(Branch(prompt.tokens))
        trajectory.at = len(trajectory.branches) - 1
        if message.error is not None:
            return [self._wait(trajectory, error=message.error)]
        try:
            branch = self._opened(message)
        except DataError as error:
            return [self._wait(trajectory, error=str(error))]
        trajectory.branches[-1] = branch
        if self._room(trajectory) < 1:
            return [self._wait(trajectory, has_room=False)]
        self._write(trajectory, branch.prompt, message.most_tokens)
        return []

    def end_turn(self, completion: Completion) -> RolloutCut | TurnFinished | None:
        """Let the answer whose turn this is wait for the environment; None if it is no turn."""
        trajectory = self._writing.pop(completion.id, None)
        if trajectory is None:
            return None
        if completion.stop == "cancelled":
            # no environment could go on with a part of the answer
            return self._events.cut(trajectory.prompt)
        text = self._renderer.text(completion.tokens)
        branch = trajectory.branch
        branch.answer = _joined(branch.answer, completion)
        branch.turns.append(Turn(role="assistant", text=text))
        trajectory.text = completion.text
        return self._wait(trajectory, text, completion.stop != "length", turn=completion)

    def go_on(self, message: ContinueTrajectory) -> list[TurnFinished]:
        """Write a conversation's next turn if there is room after the environment's messages."""
        trajectory = self._waiting.pop(_key(message), None)
        if trajectory is None or (answer := trajectory.branches[message.branch].answer) is None:
            return []
        trajectory.at, branch = message.branch, trajectory.branches[message.branch]
        tokens = message.tokens
        try:
            if tokens is None:
                tokens = self._renderer.following(message.messages, answer.tokens)
            else:
                self._renderer.require_known(tokens)
        except DataError as error:
            return [self._wait(trajectory, error=str(error))]
        has_room = self._room(trajectory) > len(tokens)
        # an agent may go on in another way
        if has_room or not self._reports_tokens:
            branch.turns += _turns(message.messages)
        if not has_room:
            return [self._wait(trajectory, has_room=False)]
        if tokens:
            span = OriginSpan(origin="environment", tokens=len(tokens))
            branch.answer = msgspec.structs.replace(
                answer, tokens=[*answer.tokens, *tokens], origins=(*answer.origins, span)
            )
        self._write(trajectory, tokens, message.most_tokens)
        return []

    def end(self, message: EndTrajectory) -> Trajectory | None:
        """Return an answer that is over; None if the rank has given it up."""
        trajectory = self._waiting.pop(_key(message), None)
        if trajectory is not None:
            trajectory.branch.turns += _turns(message.messages)
        return trajectory

    def give_up(self) -> list[RolloutCut]:
        """Give back the training prompts whose answers wait for the environment."""
        given_up = [t.prompt for t in self._waiting.values() if t.prompt.purpose == "train"]
        for prompt in given_up:
            del self._waiting[_key(prompt)]
        return [self._events.cut(prompt) for prompt in given_up]

    def tokens_before(self, request: int) -> Sequence[int]:
        """Return the tokens between a conversation's prompt and the turn that is being written."""
        trajectory = self._writing.get(request)
        return () if trajectory is None else trajectory.branch.tokens

    def branch_of(self, request: int) -> int:
        """Return the number of the answer's conversation that a request goes on with."""
        trajectory = self._writing.get(request)
        return 0 if trajectory is None else trajectory.at

    def _opened(self, message: BeginTrajectory) -> Branch:
        """Return a conversation with what the policy sees first; raise DataError."""
        prompt = message.prompt
        if message.messages is None:
            return Branch(prompt.tokens if message.tokens is None else message.tokens)
        where = f"environment: prompt {prompt.prompt}"
        tokens = message.tokens
        if tokens is None:
            tokens = self._renderer.prompt(message.messages, message.tools, where)
        else:
            self._renderer.require_known(tokens)
        context = self._settings.context
        # an agent is told that there is no room
        if not tokens or (len(tokens) >= context and not self._reports_tokens):
            raise DataError(f"{where}: it has {len(tokens)} tokens, of a context of {context}")
        return Branch(tokens, turns=_turns(message.messages))

    def _room(self, trajectory: Trajectory) -> int:
        """Count the tokens that fit behind the conversation at hand, of either side."""
        branch = trajectory.branch
        room = self._settings.context - len(branch.prompt) - len(branch.tokens)
        left = self._settings.most_tokens(trajectory.prompt) - trajectory.drawn
        return room if left > 0 else 0

    def _write(self, trajectory: Trajectory, added: Sequence[int], most_tokens: int | None) -> None:
        """Let the engine write a turn after the tokens that were added."""
        trajectory.added = added
        branch, prompt = trajectory.branch, trajectory.prompt
        most = self._settings.most_tokens(prompt) - trajectory.drawn
        request = self._make_request(
            msgspec.structs.replace(prompt, tokens=branch.prompt),
            branch.tokens,
            most if most_tokens is None else min(most, most_tokens),
            trajectory.at,
        )
        self._writing[request.id] = trajectory
        self._engine.submit([request])

    def _wait(
        self,
        trajectory: Trajectory,
        text: str = "",
        has_room: bool = True,
        error: str | None = None,
        turn: Completion | None = None,
    ) -> TurnFinished:
        prompt = trajectory.prompt
        self._waiting[_key(prompt)] = trajectory
        reported = turn if self._reports_tokens else None
        return TurnFinished(
            job=prompt.job,
            step=prompt.step,
            purpose=prompt.purpose,
            prompt=prompt.prompt,
            member=prompt.member,
            text=text,
            in_thought=self._renderer.opens_thought,
            stop="stop" if has_room else "length",
            error=error,
            added=() if reported is None else tuple(trajectory.added),
            tokens=() if reported is None else tuple(reported.tokens),
            logprobs=() if reported is None else tuple(reported.logprobs),
        )


def _joined(before: Completion | None, turn: Completion) -> Completion:
    if before is None:
        return turn
    return msgspec.structs.replace(
        turn,
        tokens=[*before.tokens, *turn.tokens],
        logprobs=[*before.logprobs, *turn.logprobs],
        policies=(*before.policies, *turn.policies),
        drafters=(*before.drafters, *turn.drafters),
        origins=(*before.origins, *turn.origins),
        batches=(*before.batches, *turn.batches),
        decode_seconds=before.decode_seconds + turn.decode_seconds,
        retractions=before.retractions + turn.retractions,
    )


def _turns(messages: Sequence[dict[str, object]]) -> list[Turn]:
    return [Turn(role=str(each["role"]), text=str(each["content"])) for each in messages]


def _key(about: PromptIssued | AboutAnswer) -> AnswerKey:
    return about.step, about.purpose, about.prompt, about.member
