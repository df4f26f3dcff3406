"""Hyperparameters of drafter training; what changes in its course depends on the update's number.

The rates suit a training that starts from random weights, may end any time and never becomes too
slow to follow a policy that changes.
"""

import msgspec

# members beyond these no longer raise the rates: more weren't tried
_MOST_MEMBERS = 4


class DrafterHyperparameters(msgspec.Struct, frozen=True, kw_only=True):
    # guesses in a row that a chain is trained on
    steps: int = 4
    # weight of a step's loss relative to the step before it
    step_discount: float = 0.8
    # rows in a micro-batch
    rows: int = 1024
    matrix_rate: float = 0.02
    vector_rate: float = 3e-3
    warmup: int = 5
    # from this update on, rates fall with the inverse root of the update's number
    decay_start: int = 100
    # updates that count as made before this training, for a drafter loaded from elsewhere
    past: int = 0
    # rates never fall below this part of the full ones
    lowest_factor: float = 0.1
    # the running mean covers this part of all updates, but no more than `longest_mean` of them
    mean_part: float = 0.1
    longest_mean: int = 200

    def rates(self, update: int, steps: int, members: int = 1) -> tuple[float, float]:
        """Return the rates for matrices and for the rest.

        Both numbers count from 0; `steps` are the optimiser's own. Averaging the work of several
        members takes away noise, so that each may move further.
        """
        decay = (self.decay_start / (self.past + update + 1)) ** 0.5
        falling = max(self.lowest_factor, decay)
        factor = min(1.0, (steps + 1) / self.warmup, falling)
        factor *= min(members, _MOST_MEMBERS) ** 0.5
        return self.matrix_rate * factor, self.vector_rate * factor

    def mean_weight(self, updates: int) -> float:
        """Return the newest weights' share of the running mean after this many updates."""
        if updates == 1:
            return 1.0
        return 1.0 / (1.0 + min(self.mean_part * updates, self.longest_mean))
