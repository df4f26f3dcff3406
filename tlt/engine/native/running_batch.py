"""The rows that run together. Rows are the truth; tensors are derived when the set changes.

Where a row stands is known on the host without asking the device: every step gives it one token,
and those drafts besides that it accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tlt.engine.base import Request
from tlt.engine.native.attention_segments import Segment, cheapest_segments
from tlt.engine.native.gumbel_noise import GumbelNoise
from tlt.engine.native.token_sampler import Sampler
from tlt.ids import StopReason


@dataclass(kw_only=True, eq=False)
class Row:
    request: Request
    # the decode step that made, or will make, its first token
    first_step: int
    started: float
    # the position of the last token that it may have
    limit: int
    # kept on the host only where stop strings are looked for
    tokens: list[int] = field(default_factory=list[int])
    # steps that gave it more than one token, and how many more
    gains: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    gained: int = 0
    # whether its last token is a draft: the policy's own one after it was not kept
    ends_on_draft: bool = False
    # positions that the drafter's cache holds
    drafted: int = 0

    def position(self, step: int) -> int:
        """Where its newest token stands before this step: known, but not yet in the cache."""
        return len(self.request.prompt) - 1 + step - self.first_step + self.gained

    def gain(self, step: int, tokens: int) -> None:
        if tokens:
            self.gains.append((step, tokens))
            self.gained += tokens


class RunningBatch:
    def __init__(
        self,
        rows: Sequence[Row],
        step: int,
        tokens: torch.Tensor,
        noise: GumbelNoise,
        like: torch.Tensor,
    ) -> None:
        """`tokens` [slots, positions] holds everything that is known of the rows."""

        def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor(values, device=tokens.device)

        self.rows = rows
        self.places = [row.position(step) for row in rows]
        self.positions = integers(self.places)
        self.starts = integers([i * tokens.shape[1] for i in range(len(rows))])
        self.newest = tokens.view(-1).index_select(0, self.starts + self.positions)
        self.sampler = Sampler([row.request for row in rows], noise, like)
        # rows whose text is searched for stop strings
        self.watched = [i for i, row in enumerate(rows) if row.request.stop_strings]
        self._steps = torch.arange(tokens.shape[1], device=tokens.device)
        # where it is cut, once somebody asks
        self._cuts: Sequence[Segment] | None = None
        self._limits = integers([row.limit for row in rows])
        stops = [sorted(row.request.stop_tokens) for row in rows]
        most = max(map(len, stops))
        self._stops = integers([s + [-1] * (most - len(s)) for s in stops]) if most else None

    @property
    def context(self) -> int:
        """Tokens of all rows."""
        return sum(self.places) + len(self.places)

    def ahead(self, count: int) -> torch.Tensor:
        """[rows, count]: so many positions of each row, from its newest token's on."""
        newest = self.positions[:, None]
        return newest + self._steps[:count] if count > 1 else newest

    def noise(self, most: int) -> "StepNoise":
        return StepNoise(self, most)

    def segments(self, ahead: int) -> list[Segment]:
        """What to attend to, with so many tokens from the newest on."""
        if self._cuts is None:
            self._cuts = cheapest_segments([place + 1 for place in self.places])
        segments: list[Segment] = []
        for first, last, _, _ in self._cuts:
            places = self.places[first:last]
            longest_draft = max(places)
            width = max(longest_draft + ahead, 1)
            segments.append(Segment(first, last, width, longest_draft == min(places)))
        return segments

    def judge(self, tokens: torch.Tensor, drafts: torch.Tensor | None) -> "StepOutcome":
        """A token counts if all drafts before it are what the policy drew."""
        if drafts is None:
            return self._judge_one(tokens[:, 0])
        agreed = (drafts == tokens[:, :-1]).long().cumprod_(1).sum(1)
        room = self._limits - self.positions
        stop = room + 1
        if self._stops is not None:
            stops = (tokens[..., None] == self._stops[:, None]).any(-1)
            stop = (stops.cumsum(1) == 0).sum(1).add_(1)
        accepted, rooms, stopping = torch.stack([agreed, room, stop]).tolist()
        verdict = StepOutcome([], accepted, {})
        for index, count in enumerate(accepted):
            kept = min(count + 1, rooms[index], stopping[index])
            verdict.kept.append(kept)
            if kept == stopping[index]:
                verdict.reasons[index] = "stop"
            elif kept == rooms[index]:
                verdict.reasons[index] = "length"
        return verdict

    def advance(self, tokens: torch.Tensor, kept: Sequence[int]) -> None:
        """Each row gets the first few of these [rows, window]."""
        if tokens.shape[1] == 1:
            self.newest = tokens[:, 0]
            self.positions = self.positions + 1
        else:
            counts = torch.tensor(kept, device=tokens.device)
            self.newest = tokens.gather(1, counts[:, None] - 1)[:, 0]
            self.positions = self.positions + counts
        self.places = [place + count for place, count in zip(self.places, kept, strict=True)]

    def _judge_one(self, tokens: torch.Tensor) -> "StepOutcome":
        ended = self.positions + 1 >= self._limits
        if self._stops is not None:
            stopped = (tokens[:, None] == self._stops).any(-1)
            ended |= stopped
        reasons: dict[int, StopReason] = dict.fromkeys(ended.nonzero()[:, 0].tolist(), "length")
        for index in reasons:
            if int(tokens[index]) in self.rows[index].request.stop_tokens:
                reasons[index] = "stop"
        return StepOutcome([1] * len(self.rows), [0] * len(self.rows), reasons)


class StepNoise:
    """The noise of the tokens to come, made when it is first asked for."""

    def __init__(self, batch: RunningBatch, most: int) -> None:
        self._batch = batch
        self._most = most
        self._made: torch.Tensor | None = None

    def all(self) -> torch.Tensor | None:
        """[rows, most, vocabulary]; None if nothing is drawn."""
        if self._made is None:
            self._made = self._make(self._most)
        return self._made

    def first(self, count: int) -> torch.Tensor | None:
        if self._made is None:
            return self._make(count)
        return self._made[:, :count]

    def _make(self, count: int) -> torch.Tensor | None:
        return self._batch.sampler.noise(self._batch.ahead(count) + 1)


class StepOutcome(NamedTuple):
    """By row."""

    # tokens that it gets
    kept: list[int]
    # drafts that the policy drew as well, whether the row gets them or not
    accepted: list[int]
    # of those that end with the last one kept
    reasons: dict[int, StopReason]
