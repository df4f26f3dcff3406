"""How much of the shared memory drafters and states leave to what a job cannot do without."""

from tlt.engine.native import NativeEngine

# that lie in the store while one is published: it, the one in use, and the one before
_POLICIES = 3
# bytes that rollouts hand over, where a policy is not smaller than that
_HANDED_OVER = 256 << 20
# in the store at once: what members hand in, trunks, and what engines guess with
_DELTAS = 8


class SharedMemoryBudget:
    def __init__(self, engine: NativeEngine, delta_bytes: int) -> None:
        self._engine = engine
        self._loaded = engine.version
        self._delta_bytes = delta_bytes

    def beside_drafters(self) -> int:
        """Bytes for policies, without those that lie there already, and for what rollouts say."""
        one = self._engine.policy_bytes
        published = min(self._engine.version - self._loaded, _POLICIES - 1)
        return (_POLICIES - published) * one + min(one, _HANDED_OVER)

    def beside_states(self) -> int:
        """Bytes for drafters, too, which are worth more than states."""
        return self.beside_drafters() + _DELTAS * self._delta_bytes
