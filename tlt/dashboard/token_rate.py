"""Tokens per second over the last ten seconds."""

from collections import deque

_SECONDS = 10.0


class TokenRate:
    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, at: float, tokens: int) -> None:
        self._recent.append((at, tokens))
        self._sum += tokens
        self._drop_old(at)

    def tokens_per_second(self, now: float) -> float:
        self._drop_old(now)
        return self._sum / _SECONDS

    def _drop_old(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _SECONDS:
            self._sum -= self._recent.popleft()[1]
