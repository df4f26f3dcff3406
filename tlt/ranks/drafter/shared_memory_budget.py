"""Compute how much shared memory drafters and hidden states leave to policies and rollouts."""

from tlt.engine.base import Engine

# policies in shared memory while one is published: the new, the present and the previous one
_POLICIES = 3
# room for tensors of rollouts, or the size of a policy if that is less
_ROLLOUT_BYTES = 256 << 20
# members' deltas, bases and drafters in use that are in shared memory at once
_DELTAS = 8


class SharedMemoryBudget:
    """The sizes of a job's data in shared memory."""

    def __init__(self, engine: Engine, delta_bytes: int) -> None:
        self._engine = engine
        self._loaded = engine.version
        self._delta_bytes = delta_bytes

    def beside_drafters(self) -> int:
        """Return the bytes for policies still to be published, and for rollouts."""
        one = self._engine.policy_bytes
        published = min(self._engine.version - self._loaded, _POLICIES - 1)
        return (_POLICIES - published) * one + min(one, _ROLLOUT_BYTES)

    def beside_states(self) -> int:
        """Return the bytes for policies, rollouts and drafters."""
        return self.beside_drafters() + _DELTAS * self._delta_bytes
