"""Read from the tap what SGLang's scheduler has decoded of a request, whole or in part."""

from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.engine.base import Completion, Request
from tlt.engine.sglang.client.sglang_client import PartialAnswer
from tlt.engine.sglang.shared.shared_hidden_state_buffer import (
    ACCEPTED,
    CORRECTED,
    NO_DRAFTER,
    PLAIN,
    RequestName,
    Tap,
)
from tlt.errors import RankError
from tlt.protocol.refs import BatchSpan, DrafterSpan, OriginSpan, PolicySpan

_ORIGINS = {PLAIN: "plain", ACCEPTED: "accepted", CORRECTED: "corrected"}


class TapReader:
    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    @property
    def slots(self) -> int:
        return len(self._tap.filled)

    @property
    def keeps_states(self) -> bool:
        return self._tap.states.shape[2] > 0

    @property
    def dtype(self) -> torch.dtype:
        return self._tap.states.dtype

    @property
    def token_state_example(self) -> torch.Tensor:
        return self._tap.states[0, 0]

    def fed_positions(self, name: RequestName) -> int:
        """Return how many of a request's tokens the policy has processed."""
        own = int(self._tap.holders[name.slot]) == name.serial
        return int(self._tap.filled[name.slot]) if own else 0

    def count_positions(self) -> int:
        """Count the filled positions of all slots, which change while SGLang makes progress."""
        return int(self._tap.filled.sum())

    def states(self, slot: int, positions: int) -> torch.Tensor:
        return self._tap.states[slot, :positions]

    def partial_answer(self, request: Request, name: RequestName) -> list[int] | None:
        """Return what has been decoded so far, up to the answer's end; None: nothing yet."""
        first = len(request.prompt) - 1
        # accepted drafts may go beyond the end
        fed = min(self.fed_positions(name), first + request.max_new_tokens)
        if fed <= first:
            return None
        tokens: list[int] = self._tap.tokens[name.slot, first:fed].tolist()
        for at, token in enumerate(tokens):
            if token in request.stop_tokens:
                return tokens[: at + 1]
        return tokens

    def fed_at_end(self, request: Request, name: RequestName, answer: PartialAnswer) -> int:
        """Return the processed positions of an answer that has ended."""
        end, fed = _drawn(request, answer).stop, self.fed_positions(name)
        if answer.tokens and fed < end:
            raise RankError(f"request {request.id} left no trace in SGLang's scheduler")
        return min(end, fed)

    def completion(
        self,
        request: Request,
        name: RequestName,
        answer: PartialAnswer,
        text: str,
        decode_seconds: float,
    ) -> Completion:
        tap, slot, drawn = self._tap, name.slot, _drawn(request, answer)
        return Completion(
            id=request.id,
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            text=text,
            stop=answer.stop or "cancelled",
            policies=tuple(
                PolicySpan(version=PolicyVersion(version), tokens=tokens)
                for version, tokens in _spans(tap.versions[slot], drawn)
            ),
            drafters=tuple(
                DrafterSpan(version=None if v == NO_DRAFTER else DrafterVersion(v), tokens=n)
                for v, n in _spans(tap.drafters[slot], drawn)
            ),
            origins=tuple(
                OriginSpan(origin=_ORIGINS[code], tokens=tokens)
                for code, tokens in _spans(tap.origins[slot], drawn)
            ),
            batches=tuple(
                BatchSpan(size=size, tokens=tokens)
                for size, tokens in _spans(tap.sizes[slot], drawn)
            ),
            decode_seconds=decode_seconds,
            retractions=answer.retractions,
        )


def _drawn(request: Request, answer: PartialAnswer) -> slice:
    """Return the positions whose passes drew the answer's tokens.

    The last token of the prompt drew the first one of the answer, whose last one drew none.
    """
    first = len(request.prompt) - 1
    return slice(first, first + len(answer.tokens))


def _spans(values: npt.NDArray[np.int32], drawn: slice) -> list[tuple[int, int]]:
    return [(value, len(list(same))) for value, same in groupby(values[drawn].tolist())]
