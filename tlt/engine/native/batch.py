"""The rows that run together. Rows are the truth; tensors are derived when the set changes.

Every row gains one token a step, so its position is known on the host without asking the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tlt.engine.base import Request
from tlt.engine.native.noise import Noise
from tlt.engine.native.sampling import Sampler
from tlt.engine.native.segments import cheapest_segments


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

    def position(self, step: int) -> int:
        """Where its newest token stands before this step: known, but not yet in the cache."""
        return len(self.request.prompt) - 1 + step - self.first_step


class Batch:
    def __init__(
        self,
        rows: Sequence[Row],
        step: int,
        tokens: torch.Tensor,
        noise: Noise,
        like: torch.Tensor,
    ) -> None:
        """`tokens` [slots, positions] holds everything that is known of the rows."""

        def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor(values, device=tokens.device)

        places = [row.position(step) for row in rows]
        self.rows = rows
        self.segments = cheapest_segments([place + 1 for place in places])
        self.positions = integers(places)
        self.starts = integers([i * tokens.shape[1] for i in range(len(rows))])
        self.newest = tokens.view(-1).index_select(0, self.starts + self.positions)
        self.sampler = Sampler([row.request for row in rows], noise, like)
        # rows whose text is searched for stop strings
        self.watched = [i for i, row in enumerate(rows) if row.request.stop_strings]
        self._limits = integers([row.limit for row in rows])
        stops = [sorted(row.request.stop_tokens) for row in rows]
        most = max(map(len, stops))
        self._stops = integers([s + [-1] * (most - len(s)) for s in stops]) if most else None

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to each row; which rows ended with it?"""
        self.newest = tokens
        self.positions = self.positions + 1
        self.segments = [segment.grown() for segment in self.segments]
        ended = self.positions >= self._limits
        if self._stops is not None:
            ended |= (tokens[:, None] == self._stops).any(-1)
        return ended
