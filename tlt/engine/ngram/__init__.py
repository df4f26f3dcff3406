"""The drafter without a model: what followed the same words before follows again."""

from tlt.engine.ngram.group_ngrams import Ngrams
from tlt.engine.ngram.token_index import Proposal

__all__ = ["Ngrams", "Proposal"]
