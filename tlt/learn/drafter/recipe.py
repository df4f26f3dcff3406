"""How a drafter is trained; the rates depend on the number of the update alone."""

import msgspec


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    # guesses in a row that a chain is trained on
    steps: int = 4
    # what the loss of a step weighs of the step's before it
    fading: float = 0.9
    # rows in a micro-batch, and so how long a caller waits for it
    rows: int = 1024
    matrix_rate: float = 0.02
    vector_rate: float = 3e-3
    warmup: int = 20
    # updates after which the rates begin to fall, as one over the root of the updates
    level: int = 200
    # the drafter that is used is the mean over about this part of the updates so far
    averaged: float = 0.1

    def rates(self, update: int) -> tuple[float, float]:
        """For matrices and for the rest; `update` counts from 0."""
        factor = min(1.0, (update + 1) / self.warmup, (self.level / (update + 1)) ** 0.5)
        return self.matrix_rate * factor, self.vector_rate * factor
