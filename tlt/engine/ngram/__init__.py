"""The drafter without a model: what followed the same words before follows again."""

from tlt.engine.ngram.bounded_ngram_index import NgramIndex
from tlt.engine.ngram.group_token_index import Proposal

__all__ = ["NgramIndex", "Proposal"]
