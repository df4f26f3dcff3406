"""How a drafter is trained. What changes on the way depends on the number of the update alone.

The rates suit a start from nothing that may end any time, and never become too low to follow a
policy that moves.
"""

import msgspec


class DrafterHyperparameters(msgspec.Struct, frozen=True, kw_only=True):
    # guesses in a row that a chain is trained on
    steps: int = 4
    # what a step's loss weighs of that of the step before it
    fading: float = 0.8
    # rows in a micro-batch, and so how long a caller waits for it
    rows: int = 1024
    matrix_rate: float = 0.02
    vector_rate: float = 3e-3
    warmup: int = 5
    # from this update on rates fall as one over the root of the updates, down to a part of them
    level: int = 100
    # updates that a drafter which doesn't start from nothing has behind it, as the rates see it
    past: int = 0
    lowest: float = 0.1
    # the drafter that is used is the mean over the last updates: a part of all, or so many at most
    averaged: float = 0.1
    most_averaged: int = 200

    def rates(self, update: int, steps: int) -> tuple[float, float]:
        """For matrices and for the rest; both count from 0, the optimiser's `steps` are its own."""
        falling = max(self.lowest, (self.level / (self.past + update + 1)) ** 0.5)
        factor = min(1.0, (steps + 1) / self.warmup, falling)
        return self.matrix_rate * factor, self.vector_rate * factor

    def newest(self, updates: int) -> float:
        """What the weights after so many updates weigh in their running mean."""
        if updates == 1:
            return 1.0
        return 1.0 / (1.0 + min(self.averaged * updates, self.most_averaged))
