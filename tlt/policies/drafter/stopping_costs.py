"""Limit what drafter training costs: policy updates wait until it has stopped.

The waits may take one per cent of the rollouts' seconds, and what speculation has saved with a
drafter for certain. Beyond that idle workers don't train, and answers aren't kept for it. A step of
a few tenths of a second therefore trains once in a while, a step of seconds always.
"""

import msgspec

_MOST_SHARE = 0.01


class StoppingCosts(msgspec.Struct, frozen=True, kw_only=True):
    # seconds in which updates waited, and of rollouts
    waited: float = 0.0
    rolled: float = 0.0
    # seconds that speculation has saved for certain, of all workers together
    saved: float = 0.0
    # when workers were told to stop; None if all have stopped
    since: float | None = None
    # True once the limit was explained
    explained: bool = False

    @property
    def too_high(self) -> bool:
        return self.waited > _MOST_SHARE * self.rolled + self.saved

    def begin(self, now: float) -> "StoppingCosts":
        return msgspec.structs.replace(self, since=now)

    def end(self, now: float) -> "StoppingCosts":
        if self.since is None:
            return self
        return msgspec.structs.replace(self, waited=self.waited + now - self.since, since=None)

    def add_rollout(self, seconds: float, saved: float) -> "StoppingCosts":
        return msgspec.structs.replace(self, rolled=self.rolled + seconds, saved=saved)
