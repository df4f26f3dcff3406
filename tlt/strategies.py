"""How the next decode step may go: every way gives the same tokens, at different speeds."""

import msgspec


class Off(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="off"):
    """One token a step, guessed by nobody."""


class Ngram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ngram"):
    """What followed the same words before is proposed, up to so many tokens of it."""

    tokens: int


class Draft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="draft"):
    """The drafter proposes a chain of so many tokens."""

    depth: int
    # with the policy's own noise, or its best guess without
    noise: bool = True


Strategy = Off | Ngram | Draft


def max_drafts(strategy: Strategy) -> int:
    """How many tokens it guesses at once, at most."""
    match strategy:
        case Off():
            return 0
        case Ngram(tokens=tokens):
            return tokens
        case Draft(depth=depth):
            return depth
