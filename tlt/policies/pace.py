"""How many times as fast as plain decoding rollouts go: by accept length, or by n-grams alone.

What n-grams come to is as the answers are: a job's own control runs say it, and until there are
many of them, what other jobs came to.
"""

import math
from collections.abc import Sequence

from tlt.messages import StrategyTally
from tlt.policies.saved import Spending, Spent, speedup, spend
from tlt.strategies import Draft

# rollouts go as fast as this power of the accept length: drafting and verifying take their time
_GAIN = 0.4
_NGRAMS = 1.25
# control runs that this counts for
_NGRAMS_RUNS = 2


def with_drafter(accept_length: float) -> float:
    return accept_length**_GAIN


def with_ngrams(spending: Spending) -> float:
    """Where they guess alone; `spending` is what was decoded before there was a drafter."""
    measured = speedup(spending)
    if measured is None:
        return _NGRAMS
    runs = sum(spent.runs for spent in spending.values())
    logs = runs * math.log(measured) + _NGRAMS_RUNS * math.log(_NGRAMS)
    return max(1.0, math.exp(logs / (runs + _NGRAMS_RUNS)))


def undrafted(spending: Spending, tallies: Sequence[StrategyTally]) -> dict[int, Spent]:
    """With these, unless a drafter was asked."""
    if any(isinstance(tally.strategy, Draft) for tally in tallies):
        return dict(spending)
    return spend(spending, tallies)
