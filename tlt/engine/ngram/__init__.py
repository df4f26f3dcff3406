"""Propose tokens without a model: what followed the same words before may follow again."""

from tlt.engine.ngram.bounded_ngram_index import NgramIndex
from tlt.engine.ngram.group_token_index import Proposal

__all__ = ["NgramIndex", "Proposal"]
