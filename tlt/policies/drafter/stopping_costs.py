"""Limit what drafter training costs: policy updates wait until it has stopped.

The waits may take half a per cent of the rollouts' seconds, both of the last hundred steps or so.
Beyond that idle workers don't train, and answers aren't kept for it: steps of a few tenths of a
second train once in a while, steps of seconds nearly always. While the drafter improves and
speculation saves time for certain, the limit doesn't hold and waits aren't counted.
"""

import msgspec

_MOST_SHARE = 0.005
# weight of a step's seconds in the next step, so that one long wait isn't held against a whole job
_KEPT = 0.99


class StoppingCosts(msgspec.Struct, frozen=True, kw_only=True):
    # of the last steps, the newer the more
    wait_seconds: float = 0.0
    rollout_seconds: float = 0.0
    # the longest wait of the present update
    longest_wait: float = 0.0
    # True once the limit was explained
    explained: bool = False

    @property
    def too_high(self) -> bool:
        return self.wait_seconds > _MOST_SHARE * self.rollout_seconds

    def add_rollout(self, seconds: float) -> "StoppingCosts":
        """Count a rollout, after which an update may have to wait.

        One that was paused for hours counts no more than all before it.
        """
        counted = max(0.0, min(seconds, self.rollout_seconds or seconds))
        return msgspec.structs.replace(
            self,
            wait_seconds=_KEPT * self.wait_seconds,
            rollout_seconds=_KEPT * self.rollout_seconds + counted,
            longest_wait=0.0,
        )

    def add_wait(self, seconds: float) -> "StoppingCosts":
        """Count how long a worker took to stop; an update waits for the slowest one."""
        longest = max(self.longest_wait, seconds)
        waited = self.wait_seconds + longest - self.longest_wait
        return msgspec.structs.replace(self, wait_seconds=waited, longest_wait=longest)
