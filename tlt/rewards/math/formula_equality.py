"""Decide whether two formulas have the same value.

They are compared at fixed points, because `simplify` has no bound on its time: (x+1)^2 and
x^2+2x+1 agree everywhere.
"""

from collections.abc import Iterator
from fractions import Fraction

import sympy
from math_verify import verify

from tlt.rewards.math.evaluation import NoValue, Value, as_float, choose, close, value_of
from tlt.rewards.math.formulas import Tree, parse_formula

_UNEVALUATED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)


def same_formula(gold: str, answer: str) -> bool:
    """Compare two formulas by their values at some points; sums and integrals by math-verify."""
    left, right = parse_formula(gold), parse_formula(answer)
    if left is None or right is None:
        return False
    if left.has(*_UNEVALUATED):
        return right.has(*_UNEVALUATED) and verify(left, right, timeout_seconds=None)
    agreed = False
    for point, real in _points(left, right):
        try:
            here = [value_of(tree, point, real=real) for tree in (left, right)]
        except NoValue:
            continue
        if not close(*here):
            return False
        agreed = True
    return agreed


def _points(*trees: Tree) -> Iterator[tuple[dict[str, Value], bool]]:
    """Choose values for the variables, and say whether all has to be real there.

    Roots and logarithms of negative numbers have branches, of which a formula may mean any.
    """
    names = sorted({symbol.name for tree in trees for symbol in tree.free_symbols} - {"i"})
    if not names:
        yield {}, False
        return
    for sign in (1, 1, 1, -1, -1):
        for turn in range(1 if sign > 0 else 2):
            seed = sign * 7 + turn
            yield {name: choose(name, seed, sign) for name in names}, sign < 0
    yield {name: choose(name, 99, 1) for name in names}, False


def constant(text: str) -> Value | None:
    """Return the value of a formula without variables."""
    tree = parse_formula(text)
    if tree is None or {symbol.name for symbol in tree.free_symbols} - {"i"}:
        return None
    try:
        return value_of(tree, {})
    except NoValue:
        return None


def variables(text: str) -> frozenset[str]:
    tree = parse_formula(text)
    return frozenset() if tree is None else frozenset(s.name for s in tree.free_symbols)


def is_constant(text: str) -> bool:
    return constant(text) is not None


def proportional(gold: str, answer: str, *, positive: bool) -> bool:
    """Find out whether one formula is a constant multiple of the other: 2x-2y of x-y."""
    left, right = parse_formula(gold), parse_formula(answer)
    if left is None or right is None or left.free_symbols != right.free_symbols:
        return False
    ratio = None
    for point, real in _points(left, right):
        try:
            above, below = (value_of(tree, point, real=real) for tree in (left, right))
        except NoValue:
            continue
        if close(below, Fraction(0)) or close(above, Fraction(0)):
            return False
        here = as_float(above) / as_float(below)
        if ratio is not None and not close(ratio, here):
            return False
        ratio = here
    return ratio is not None and (not positive or bool(ratio.real > 0))
