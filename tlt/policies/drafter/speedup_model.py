"""Estimate how much speculation speeds up rollouts, with a drafter and without one.

The speedup by n-grams depends on the answers: a job's control runs measure it, and the usual value
of other jobs counts until there are many of them.
"""

import math

from tlt.config import JobSpec
from tlt.policies.speculation.savings_estimate import CostsByBucket, estimate_speedup
from tlt.strategies import Ngram

# rollouts speed up by this power of the accept length: proposing and verifying take their time
_GAIN = 0.4
_NGRAMS = 1.25
# control runs that the usual value counts for
_NGRAMS_RUNS = 2


def with_drafter(accept_length: float) -> float:
    return accept_length**_GAIN


def without_drafter(spec: JobSpec, costs: CostsByBucket) -> float:
    """Return the speedup by n-grams; `costs` are those before any drafter was adopted."""
    if not any(isinstance(arm, Ngram) for arm in spec.speculation.arms):
        return 1.0
    # where the job names a drafter, n-grams are chosen only where they do better
    measured = estimate_speedup(costs) if spec.drafter.path is None else None
    if measured is None:
        return _NGRAMS
    runs = sum(spent.runs for spent in costs.values())
    logs = runs * math.log(measured) + _NGRAMS_RUNS * math.log(_NGRAMS)
    return max(1.0, math.exp(logs / (runs + _NGRAMS_RUNS)))
