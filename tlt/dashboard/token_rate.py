"""How many tokens a second were written lately."""

from collections import deque

_SECONDS = 10.0


class Pace:
    def __init__(self) -> None:
        self._lately: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, at: float, tokens: int) -> None:
        self._lately.append((at, tokens))
        self._sum += tokens
        self._forget(at)

    def tokens_per_second(self, now: float) -> float:
        self._forget(now)
        return self._sum / _SECONDS

    def _forget(self, now: float) -> None:
        while self._lately and self._lately[0][0] < now - _SECONDS:
            self._sum -= self._lately.popleft()[1]
