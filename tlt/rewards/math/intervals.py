"""Compare parts of the real line: intervals, unions, and inequalities that are solved for x.

Two regions are the same if they agree on their ends, between these and beyond.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from tlt.rewards.math import formula_equality as values
from tlt.rewards.math.answers import Answer, Items, Joined, Leaf, Relation, Words
from tlt.rewards.math.evaluation import close, is_real, real_part
from tlt.rewards.math.units import NONE

_INTERVALS = ("()", "[]", "(]", "[)")
# |x|, |x - 2| or |x + 2|
_DISTANCE = re.compile(r"\|([a-z])(?:([+-])(\d+(?:\.\d+)?))?\|")
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_ALL = ("all real numbers", "all reals", "real numbers", "all real number")


def is_region(answer: Answer) -> bool:
    """Find out whether an answer can be a part of the real line; numbers alone can't."""
    match answer:
        case Items(kind=kind, items=items) if kind in _INTERVALS:
            ends = [_end(item) for item in items]
            return len(ends) == 2 and None not in ends and ends[0] < ends[1]
        case Items(kind="list", items=items):
            return all(isinstance(item, Relation) and is_region(item) for item in items)
        case Joined(parts=parts):
            return all(is_region(part) or _is_finite(part) for part in parts)
        case Relation():
            return _variable(answer) is not None or _opened(answer) is not answer
        case Leaf(text=text):
            return text == r"\mathbb{R}"
        case Words(text=text):
            return text in _ALL
        case _:
            return False


def same_region(gold: Answer, answer: Answer) -> bool:
    gold, answer = _opened(gold), _opened(answer)
    names = _variables(gold) | _variables(answer)
    if len(names) > 1:
        return False
    ends = sorted({*_ends(gold), *_ends(answer)})
    points = [(low + high) / 2 for low, high in pairwise(ends)] + ends
    points += [ends[0] - 1, ends[-1] + 1] if ends else [0]
    return all(
        _contains(gold, point, points) == _contains(answer, point, points) for point in points
    )


def _opened(answer: Answer) -> Answer:
    """Write |x - a| < c as a - c < x < a + c, and |x - a| > c as its two sides."""
    match answer:
        case Items(items=parts):
            return replace(answer, items=tuple(map(_opened, parts)))
        case Joined(parts=parts):
            return replace(answer, parts=tuple(map(_opened, parts)))
        case Relation(sides=(Leaf() as left, Leaf() as right), operators=(operator,)):
            if _DISTANCE.fullmatch(left.text.replace(" ", "")) is None:
                left, right, operator = right, left, _TURNED.get(operator, operator)
            distance = _DISTANCE.fullmatch(left.text.replace(" ", ""))
            if distance is None or operator not in _TURNED or _end(right) is None:
                return answer
            name = Leaf(distance[1], NONE, distance[1])
            middle = {"-": "", "+": "-"}.get(distance[2] or "-", "") + (distance[3] or "0")
            low, high = (f"{middle}{sign}({right.text})" for sign in "-+")
            ends = [Leaf(text, NONE, text) for text in (low, high)]
            if operator in ("<", "<="):
                return Relation((ends[0], name, ends[1]), (operator, operator))
            below = Relation((name, ends[0]), (_TURNED[operator],))
            return Items("list", (below, Relation((name, ends[1]), (operator,))), "or")
        case _:
            return answer


def _end(answer: Answer) -> Any:
    """Return an end of an interval as a float of many digits; None if it isn't a real number."""
    if not isinstance(answer, Leaf):
        return None
    value = values.constant(answer.text)
    return real_part(value) if value is not None and is_real(value) else None


def _is_finite(answer: Answer) -> bool:
    return (
        isinstance(answer, Items) and answer.kind == "set" and None not in map(_end, answer.items)
    )


def _variable(relation: Relation) -> str | None:
    """Return the x of `1 < x <= 2`; None if it isn't solved for one variable."""
    names = [side.text for side in relation.sides if isinstance(side, Leaf) and _end(side) is None]
    inequality = all(operator in ("<", ">", "<=", ">=", "!=") for operator in relation.operators)
    if not inequality or len(names) != 1 or len(relation.sides) > 3:
        return None
    if any(not isinstance(side, Leaf) for side in relation.sides):
        return None
    return names[0] if values.variables(names[0]) == frozenset([names[0].lstrip("\\")]) else None


def _variables(answer: Answer) -> set[str]:
    match answer:
        case Relation():
            name = _variable(answer)
            return {name} if name else set()
        case Items(kind="list", items=parts) | Joined(parts=parts):
            return {name for part in parts for name in _variables(part)}
        case _:
            return set()


def _ends(answer: Answer) -> Iterator[Any]:
    """Name the finite numbers at which membership may change."""
    match answer:
        case Relation(sides=parts) | Items(items=parts) | Joined(parts=parts):
            for part in parts:
                yield from _ends(part)
        case Leaf():
            end = _end(answer)
            if end is not None and abs(end) < 10**40:
                yield end
        case _:
            return


def _contains(answer: Answer, x: Any, points: list[Any]) -> bool:
    match answer:
        case Items(kind="set", items=items):
            return any(_equal(_end(item), x) for item in items)
        case Items(kind="list", items=items):
            every = answer.joint == "and" or (
                answer.joint == ","
                and any(all(_contains(item, point, points) for item in items) for point in points)
            )
            return (all if every else any)(_contains(item, x, points) for item in items)
        case Items(kind=kind, items=(low, high)):
            below = "<=" if kind[0] == "[" else "<"
            above = "<=" if kind[1] == "]" else "<"
            return _holds(_end(low), below, x) and _holds(x, above, _end(high))
        case Joined(operator=operator, parts=parts):
            inside = [_contains(part, x, points) for part in parts]
            if operator == "setminus":
                return inside[0] and not any(inside[1:])
            return any(inside) if operator == "cup" else all(inside)
        case Relation(sides=sides, operators=operators):
            ends = [x if (end := _end(side)) is None else end for side in sides]
            return all(
                _holds(left, operator, right)
                for left, operator, right in zip(ends, operators, ends[1:], strict=False)
            )
        case _:
            return True


def _equal(left: Any, right: Any) -> bool:
    return close(left, right)


def _holds(left: Any, operator: str, right: Any) -> bool:
    equal = _equal(left, right)
    match operator:
        case "!=":
            return not equal
        case "<=" | ">=" if equal:
            return True
        case "<" | ">" if equal:
            return False
        case "<" | "<=":
            return left < right
        case _:
            return left > right
