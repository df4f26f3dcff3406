"""Exploring strategies may cost a share of decoding time, saved up for a few steps at most."""

_SHARE = 0.01
_SAVED_STEPS = 2.0
# a new drafter is worth exploring at once
_GRANTED_STEPS = 4.0


class ExplorationBudget:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._grant_due = True

    def grant(self) -> None:
        """Add a grant of a few steps to the next earnings."""
        self._grant_due = True

    def earn(self, seconds: float, step_seconds: float) -> None:
        """Add a share of this decoding time, and the grant if one is due."""
        if self._grant_due:
            self.seconds = max(self.seconds, _GRANTED_STEPS * step_seconds)
            self._grant_due = False
        self._add(_SHARE * seconds, step_seconds)

    def spend(self, seconds: float, step_seconds: float) -> None:
        """Subtract the loss of a trial; a trial that was faster than the best one adds to it."""
        self._add(-seconds, step_seconds)

    def _add(self, seconds: float, step_seconds: float) -> None:
        most = max(self.seconds, _SAVED_STEPS * step_seconds)
        self.seconds = min(self.seconds + seconds, most)
