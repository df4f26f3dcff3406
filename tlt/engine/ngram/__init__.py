"""Propose tokens without a model: what followed the same words before may follow again."""

from tlt.engine.ngram.bounded_ngram_index import NgramIndex

__all__ = ["NgramIndex"]
