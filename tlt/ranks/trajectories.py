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
from tlt.ranks.answer_events import AnswerEvents, Trajectory
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
        make_request: Callable[[PromptIssued, Sequence[int], int], Request],
    ) -> None:
        # False from a cut until the next rollout batch, which is of this step
        self.is_open = True
        self.step = Step(0)
        self._engine = engine
        self._settings = settings
        self._renderer = renderer
        self._events = events
        self._make_request = make_request
        # by request: those whose turn the engine writes
        self._writing: dict[int, Trajectory] = {}
        # those that wait for the environment
        self._waiting: dict[AnswerKey, Trajectory] = {}

    def begin(self, message: BeginTrajectory) -> list[RolloutCut | TurnFinished]:
        """Write an answer's first turn; after a cut, give its prompt back at once."""
        prompt = message.prompt
        is_late = prompt.purpose == "train" and prompt.step < self.step
        if is_late or not self.is_open:
            return [self._events.cut(prompt)]
        trajectory = Trajectory(prompt)
        self._waiting.pop(_key(prompt), None)
        if message.error is not None:
            return [self._wait(trajectory, error=message.error)]
        if message.messages is not None:
            where = f"environment: prompt {prompt.prompt}"
            try:
                tokens = self._renderer.prompt(message.messages, message.tools, where)
            except DataError as error:
                return [self._wait(trajectory, error=str(error))]
            context = self._settings.context
            if not 0 < len(tokens) < context:
                error = f"{where}: it has {len(tokens)} tokens, of a context of {context}"
                return [self._wait(trajectory, error=error)]
            trajectory.prompt = msgspec.structs.replace(prompt, tokens=tokens)
            trajectory.turns += _turns(message.messages)
        self._write(trajectory)
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
        trajectory.answer = _joined(trajectory.answer, completion)
        trajectory.turns.append(Turn(role="assistant", text=text))
        return self._wait(trajectory, text, has_room=completion.stop != "length")

    def go_on(self, message: ContinueTrajectory) -> list[TurnFinished]:
        """Write an answer's next turn if there is room after the environment's messages."""
        trajectory = self._waiting.pop(_key(message), None)
        if trajectory is None or trajectory.answer is None:
            return []
        answer, prompt = trajectory.answer, trajectory.prompt
        try:
            tokens = self._renderer.following(message.messages, answer.tokens)
        except DataError as error:
            return [self._wait(trajectory, error=str(error))]
        trajectory.turns += _turns(message.messages)
        room = self._settings.context - len(prompt.tokens) - len(answer.tokens) - len(tokens)
        if room < 1 or trajectory.drawn >= self._settings.most_tokens(prompt):
            return [self._wait(trajectory, has_room=False)]
        if tokens:
            span = OriginSpan(origin="environment", tokens=len(tokens))
            trajectory.answer = msgspec.structs.replace(
                answer, tokens=[*answer.tokens, *tokens], origins=(*answer.origins, span)
            )
        self._write(trajectory)
        return []

    def end(self, message: EndTrajectory) -> Trajectory | None:
        """Return an answer that is over; None if the rank has given it up."""
        trajectory = self._waiting.pop(_key(message), None)
        if trajectory is not None:
            trajectory.turns += _turns(message.messages)
        return trajectory

    def give_up(self) -> list[RolloutCut]:
        """Give back the training prompts whose answers wait for the environment."""
        given_up = [t.prompt for t in self._waiting.values() if t.prompt.purpose == "train"]
        for prompt in given_up:
            del self._waiting[_key(prompt)]
        return [self._events.cut(prompt) for prompt in given_up]

    def tokens_before(self, request: int) -> Sequence[int]:
        """Return the tokens between an answer's prompt and the turn that is being written."""
        trajectory = self._writing.get(request)
        return () if trajectory is None else trajectory.tokens

    def _write(self, trajectory: Trajectory) -> None:
        request = self._make_request(trajectory.prompt, trajectory.tokens, trajectory.drawn)
        self._writing[request.id] = trajectory
        self._engine.submit([request])

    def _wait(
        self,
        trajectory: Trajectory,
        text: str = "",
        has_room: bool = True,
        error: str | None = None,
    ) -> TurnFinished:
        prompt = trajectory.prompt
        self._waiting[_key(prompt)] = trajectory
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
