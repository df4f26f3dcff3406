"""How many times as fast as plain decoding rollouts go: by accept length, or without a drafter.

What n-grams come to is as the answers are: a job's own control runs say it, and until there are
many of them, what other jobs came to.
"""

import math

from tlt.config import JobSpec
from tlt.policies.speculation.savings_estimate import CostsByBucket, estimate_speedup
from tlt.strategies import Ngram

# rollouts go as fast as this power of the accept length: drafting and verifying take their time
_GAIN = 0.4
_NGRAMS = 1.25
# control runs that this counts for
_NGRAMS_RUNS = 2


def with_drafter(accept_length: float) -> float:
    return accept_length**_GAIN


def without(spec: JobSpec, spending: CostsByBucket) -> float:
    """`spending`: what was decoded before any drafter was adopted."""
    if not any(isinstance(arm, Ngram) for arm in spec.speculation.arms):
        return 1.0
    # where the job names a drafter, n-grams guess only what they are better at
    measured = estimate_speedup(spending) if spec.drafter.path is None else None
    if measured is None:
        return _NGRAMS
    runs = sum(spent.runs for spent in spending.values())
    logs = runs * math.log(measured) + _NGRAMS_RUNS * math.log(_NGRAMS)
    return max(1.0, math.exp(logs / (runs + _NGRAMS_RUNS)))
