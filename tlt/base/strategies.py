"""Strategies of a decode step: each samples from the policy, at a different speed."""

from typing import Annotated

import msgspec

# bounds what a loop over proposals does; specs allow fewer
_Drafts = Annotated[int, msgspec.Meta(le=1 << 16)]


class Off(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="off"):
    """Propose nothing: one token per row and step."""


class Ngram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ngram"):
    """Propose up to `tokens` tokens that followed the same tokens before."""

    tokens: _Drafts


class Draft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="draft"):
    """Propose a chain of `depth` tokens with the drafter."""

    depth: _Drafts
    # sample with the policy's own noise; otherwise take the drafter's most likely tokens
    noise: bool = True


Strategy = Off | Ngram | Draft


def max_drafts(strategy: Strategy) -> int:
    """Return the most tokens that a strategy proposes in one step."""
    match strategy:
        case Off():
            return 0
        case Ngram(tokens=tokens):
            return tokens
        case Draft(depth=depth):
            return depth
