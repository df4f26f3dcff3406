"""The drafter without a model: what followed the same words before follows again."""

from tlt.engine.ngrams.history import Proposal
from tlt.engine.ngrams.ngrams import Ngrams

__all__ = ["Ngrams", "Proposal"]
