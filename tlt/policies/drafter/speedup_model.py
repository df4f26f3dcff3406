"""Estimate how much speculation speeds up rollouts, with a drafter and without one.

The speedup by n-grams depends on the answers: a job's control runs measure it, and the usual value
of other jobs counts until there are many of them.
"""

import math

from tlt.base.strategies import Ngram
from tlt.policies.speculation.savings_estimate import DecodeAccount, estimate_speedup
from tlt.spec.config import JobSpec

# Rollouts speed up by this power of the accept length, because proposing and verifying take time:
# measured were 2.1 at 3.9 and 2.45 at 4.7.
_GAIN = 0.55
# Each strategy is used where it does better, so together they save more than the better of both.
_TOGETHER = 4.0
_NGRAMS = 1.25
# control runs that the usual value counts for
_NGRAMS_RUNS = 2


def with_drafter(accept_length: float, without: float, realised: float = 1.0) -> float:
    """Return the speedup by a drafter and n-grams together; `without` is that by n-grams alone.

    `realised` is the share of the gain over n-grams that rollouts of this job have shown so far.
    """
    drafter = accept_length ** (_GAIN * _TOGETHER)
    together = (without**_TOGETHER + drafter - 1.0) ** (1.0 / _TOGETHER)
    return without + realised * (together - without)


def without_drafter(spec: JobSpec, decoding: DecodeAccount) -> float:
    """Return the speedup by n-grams; `decoding` is that before any drafter was adopted."""
    if not any(isinstance(arm, Ngram) for arm in spec.speculation.arms):
        return 1.0
    # where the job names a drafter, n-grams are chosen only where they do better
    measured = estimate_speedup(decoding) if spec.drafter.path is None else None
    if measured is None:
        return _NGRAMS
    runs = decoding.runs
    logs = runs * math.log(measured) + _NGRAMS_RUNS * math.log(_NGRAMS)
    return max(1.0, math.exp(logs / (runs + _NGRAMS_RUNS)))
