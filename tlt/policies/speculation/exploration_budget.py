"""What trying other arms may cost: a share of the time that passed, saved up for a few rounds."""

_SHARE = 0.01
_SAVED_ROUNDS = 2.0
# something new is worth trying at once
_GRANTED_ROUNDS = 4.0


class ExplorationBudget:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._grant_due = True

    def grant(self) -> None:
        self._grant_due = True

    def earn(self, seconds: float, round_seconds: float) -> None:
        if self._grant_due:
            self.seconds = max(self.seconds, _GRANTED_ROUNDS * round_seconds)
            self._grant_due = False
        self._save(_SHARE * seconds, round_seconds)

    def spend(self, seconds: float, round_seconds: float) -> None:
        """Less than nothing where the trial was faster than what it was tried against."""
        self._save(-seconds, round_seconds)

    def _save(self, seconds: float, round_seconds: float) -> None:
        most = max(self.seconds, _SAVED_ROUNDS * round_seconds)
        self.seconds = min(self.seconds + seconds, most)
