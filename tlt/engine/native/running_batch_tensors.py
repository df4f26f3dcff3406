"""The rows that decode together, and the tensors that are derived from them when the set changes.

The host knows each row's position without asking the device: every step gives it one token, and as
many more as drafts were accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tlt.base.id_types import StopReason
from tlt.engine.base import Request
from tlt.engine.native.gumbel_noise import GumbelNoise
from tlt.engine.native.rows_by_length import Segment, cheapest_segments
from tlt.engine.native.token_sampler import Sampler


@dataclass(kw_only=True, eq=False)
class Row:
    request: Request
    # the decode step that produces its first token
    first_step: int
    started: float
    # the position of the last token that it may have
    limit: int
    # filled only if the request has stop strings
    tokens: list[int] = field(default_factory=list[int])
    # steps that gave it more than one token, and how many more each gave
    accepted_by_step: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    accepted: int = 0
    # true if its last token is a draft, after which the policy's own token was not kept
    ends_on_draft: bool = False

    def position(self, step: int) -> int:
        """Return the position of its newest token before a step: sampled, but not yet cached."""
        return len(self.request.prompt) - 1 + step - self.first_step + self.accepted

    def add_accepted(self, step: int, tokens: int) -> None:
        if tokens:
            self.accepted_by_step.append((step, tokens))
            self.accepted += tokens


class StepOutcome(NamedTuple):
    """The tokens that a step gave each row."""

    # how many tokens each row gets
    kept: list[int]
    # how many drafts the policy sampled as well, even if the row doesn't get them
    accepted: list[int]
    # by row that ends with its last kept token: the stop reason
    reasons: dict[int, StopReason]


class RunningBatch:
    def __init__(
        self,
        rows: Sequence[Row],
        step: int,
        tokens: torch.Tensor,
        noise: GumbelNoise,
        like: torch.Tensor,
    ) -> None:
        """Derive tensors from rows and `tokens` [slots, positions], which hold all of their tokens.

        `like` has the device and dtype of the logits.
        """

        def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor(values, device=tokens.device)

        self.rows = rows
        # positions of the rows' newest tokens, on the host and on the device
        self.last_positions = [row.position(step) for row in rows]
        self.positions = integers(self.last_positions)
        # tokens of all rows
        self.context = sum(self.last_positions) + len(rows)
        self.starts = integers([i * tokens.shape[1] for i in range(len(rows))])
        self.newest = tokens.view(-1).index_select(0, self.starts + self.positions)
        self.sampler = Sampler([row.request for row in rows], noise, like)
        # rows with stop strings
        self.watched = [i for i, row in enumerate(rows) if row.request.stop_strings]
        self._range = torch.arange(tokens.shape[1], device=tokens.device)
        self._cuts: Sequence[Segment] | None = None
        self._limits = integers([row.limit for row in rows])
        stops = [sorted(row.request.stop_tokens) for row in rows]
        most = max(map(len, stops))
        self._stops = integers([s + [-1] * (most - len(s)) for s in stops]) if most else None
        # what the last check let each row keep, on the device and on the host
        self._counts: torch.Tensor | None = None
        self._counted: tuple[int, ...] = ()

    def next_positions(self, count: int) -> torch.Tensor:
        """Return [rows, count]: positions from each row's newest token on."""
        newest = self.positions[:, None]
        return newest + self._range[:count] if count > 1 else newest

    def noise(self, most: int) -> "StepNoise":
        return StepNoise(self, most)

    def segments(self, ahead: int) -> list[Segment]:
        """Cut the batch for attention over `ahead` tokens from each row's newest token on."""
        if self._cuts is None:
            self._cuts = cheapest_segments([position + 1 for position in self.last_positions])
        segments: list[Segment] = []
        for first, last, _, _ in self._cuts:
            positions = self.last_positions[first:last]
            longest = max(positions)
            width = max(longest + ahead, 1)
            segments.append(Segment(first, last, width, longest == min(positions)))
        return segments

    def check(self, tokens: torch.Tensor, drafts: torch.Tensor | None) -> StepOutcome:
        """Compare drafts with sampled tokens: a token counts if all drafts before it agree."""
        if drafts is None:
            return self._check_single(tokens)
        agreed = (drafts == tokens[:, :-1]).long().cumprod_(1).sum(1)
        room = self._limits - self.positions
        stop = room + 1
        if self._stops is not None:
            stops = (tokens[..., None] == self._stops[:, None]).any(-1)
            stop = (stops.cumsum(1) == 0).sum(1).add_(1)
        self._counts = torch.minimum(torch.minimum(agreed + 1, room), stop)
        # read at once, because the host waits for the device here
        accepted, kept, stopping = torch.stack([agreed, self._counts, stop]).tolist()
        outcome = StepOutcome(kept, accepted, {})
        self._counted = tuple(kept)
        for index, count in enumerate(kept):
            if count == stopping[index]:
                outcome.reasons[index] = "stop"
            elif self.last_positions[index] + count == self.rows[index].limit:
                outcome.reasons[index] = "length"
        return outcome

    def advance(self, tokens: torch.Tensor, kept: Sequence[int]) -> None:
        """Give each row the first `kept` of its tokens [rows, window]."""
        if tokens.shape[1] == 1:
            self.newest = tokens[:, 0]
            self.positions = self.positions + 1
        else:
            counts = self._counts
            if counts is None or tuple(kept) != self._counted:  # cut by a stop string
                counts = torch.tensor(kept, device=tokens.device)
            self.newest = tokens.gather(1, counts[:, None] - 1)[:, 0]
            self.positions = self.positions + counts
        self.context += sum(kept)
        self.last_positions = [
            position + count for position, count in zip(self.last_positions, kept, strict=True)
        ]

    def _check_single(self, tokens: torch.Tensor) -> StepOutcome:
        reasons: dict[int, StopReason] = {
            index: "length"
            for index, (row, position) in enumerate(
                zip(self.rows, self.last_positions, strict=True)
            )
            if position + 1 >= row.limit
        }
        if self._stops is not None:
            stopped: list[bool] = (tokens == self._stops).any(-1).tolist()
            reasons |= {index: "stop" for index, found in enumerate(stopped) if found}
        return StepOutcome([1] * len(self.rows), [0] * len(self.rows), reasons)


class StepNoise:
    """The noise of a step's tokens, made when it is first needed."""

    def __init__(self, batch: RunningBatch, most: int) -> None:
        self._batch = batch
        self._most = most
        self._made: torch.Tensor | None = None

    def all(self) -> torch.Tensor | None:
        """Return [rows, most, vocabulary], or None if all rows are greedy."""
        if self._made is None:
            self._made = self._make(self._most)
        return self._made

    def first(self, count: int) -> torch.Tensor | None:
        if self._made is None:
            return self._make(count)
        return self._made[:, :count]

    def _make(self, count: int) -> torch.Tensor | None:
        return self._batch.sampler.noise(self._batch.next_positions(count) + 1)
