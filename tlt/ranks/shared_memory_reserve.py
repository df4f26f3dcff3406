"""Compute how much shared memory drafters and hidden states leave to policies and rollouts."""

from tlt.engine.native import NativeEngine

# in shared memory while one is published: the new one, the one in use, and the one before
_POLICIES = 3
# tensors of rollouts, or as much as a policy if that is less
_ROLLOUT_BYTES = 256 << 20
# in shared memory at once: members' deltas, bases, and drafters in use
_DELTAS = 8


class SharedMemoryBudget:
    """Sizes of what a job keeps in shared memory."""

    def __init__(self, engine: NativeEngine, delta_bytes: int) -> None:
        self._engine = engine
        self._loaded = engine.version
        self._delta_bytes = delta_bytes

    def beside_drafters(self) -> int:
        """Return the bytes for policies that aren't there yet, and for rollouts."""
        one = self._engine.policy_bytes
        published = min(self._engine.version - self._loaded, _POLICIES - 1)
        return (_POLICIES - published) * one + min(one, _ROLLOUT_BYTES)

    def beside_states(self) -> int:
        """Return the bytes for policies, rollouts and drafters."""
        return self.beside_drafters() + _DELTAS * self._delta_bytes
