"""Compare the structure of an answer with that of the right answer, part by part."""

import re
from dataclasses import replace
from fractions import Fraction

from tlt.rewards.math import evaluation, numbers
from tlt.rewards.math import formula_equality as values
from tlt.rewards.math.answers import (
    Answer,
    Items,
    Joined,
    Leaf,
    Matrix,
    Ratio,
    Relation,
    Residue,
    Words,
    plain_words,
)
from tlt.rewards.math.intervals import is_region, same_region
from tlt.rewards.math.units import NONE, SHARE, conversion

_MOST_ITEMS = 60
_BASE = re.compile(r"\(?([0-9A-Za-z]+)\)?\s*_\{(?:(\d+)|\\text\{(\w+)\})\}")
_BASES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
    "sixteen": 16,
}
_VARIABLE = re.compile(r"[A-Za-z](?:_\{\w+\})?|\\(?:theta|alpha|beta|gamma|lambda|phi|mu|omega)")
_LABEL = re.compile(
    r"(?:[A-Za-z]|\\[a-zA-Z]+|_\{[^{}]*\}|\^\{-1\}|\([^()0-9]*\)|'|\s|\\text\{[^{}]*\}|\((?:-?\d+|[a-z])\)|\{[^{}]*\})+"
)


def same(gold: Answer, answer: Answer) -> bool:
    """Judge an answer by the right one; the conventions are in docs/rewards.md."""
    if gold == answer:
        return True
    gold, answer = _single(gold), _single(answer)
    if isinstance(gold, Relation | Items | Joined | Leaf | Words) and (
        is_region(gold) and is_region(answer)
    ):
        if same_region(gold, answer):
            return True
        if not (isinstance(gold, Items) and isinstance(answer, Items)):
            return False
    match gold, answer:
        case Residue(), _:
            return _same_residue(gold, answer)
        case _, Residue():
            return same(gold, answer.value)
        case Relation(), Relation():
            return _same_relation(gold, answer)
        case _, Relation() if _is_equation(answer):
            return any(same(gold, value) for value in _right_sides(answer))
        case Relation(), _ if _is_assignment(gold):
            return any(same(value, answer) for value in _right_sides(gold))
        case Ratio(), Ratio():
            return _same_ratio(gold, answer)
        case (Ratio(parts), Leaf() as other) | (Leaf() as other, Ratio(parts)) if len(parts) == 2:
            return _is_quotient(parts, other)
        case Items(), Items():
            return _same_items(gold, answer)
        case Items(), Matrix():
            return _is_vector(answer, gold)
        case Matrix(), Items():
            return _is_vector(gold, answer)
        case Matrix(), Matrix():
            return _same_matrix(gold, answer)
        case Joined(), Joined():
            return gold.operator == answer.operator and _matches(gold.parts, answer.parts)
        case Words(), Leaf():
            return gold.text == plain_words(answer.whole)
        case Leaf(), Words():
            return plain_words(gold.whole) == answer.text
        case Leaf(), Leaf():
            return _same_leaf(gold, answer)
        case _:
            return False


def _single(answer: Answer) -> Answer:
    """Return what a list or a set of one holds, unless it holds a set: {∅} isn't ∅."""
    match answer:
        case Items(items=(Items(kind="set"),)):
            return answer
        case Items(items=(item,)):
            return item
        case _:
            return answer


# --- numbers and formulas


def _same_leaf(gold: Leaf, answer: Leaf) -> bool:
    if _BASE.fullmatch(gold.text) or _BASE.fullmatch(answer.text):
        return _in_base(gold.text) == _in_base(answer.text)
    if (gold.unit == SHARE) != (answer.unit == SHARE):
        other = answer if gold.unit == SHARE else gold
        hundredth = Fraction(1, 100) if answer.unit == SHARE else Fraction(100)
        factors = [Fraction(1), hundredth] if not other.unit.measures else []
    else:
        factor = conversion(gold.unit, answer.unit)
        factors = [] if factor is None else [factor]
    if any(_same_value(gold.text, answer.text, factor) for factor in factors):
        return True
    # `5 m` may be a product
    ambiguous = gold.unit != answer.unit and NONE in (gold.unit, answer.unit)
    return ambiguous and values.same_formula(gold.whole, answer.whole)


def _same_value(gold: str, answer: str, factor: Fraction) -> bool:
    left, right = numbers.parse_number(gold), numbers.parse_number(answer)
    if left and right:
        return numbers.same_number(left, right.scaled(factor))
    if factor != 1:
        answer = rf"\frac{{{factor.numerator}}}{{{factor.denominator}}}\cdot ({answer})"
    if left or right:
        number = left or (right and right.scaled(factor))
        value = values.constant(answer if left else gold)
        if number is None or value is None:
            return values.same_formula(gold, answer)
        return evaluation.close(number.value, value) or numbers.rounds(number, value)
    return values.same_formula(gold, answer)


def _in_base(text: str) -> tuple[str, int]:
    """Return a number's digits and its base."""
    match = _BASE.fullmatch(text)
    if match is None:
        return text.lstrip("0"), 10
    base = int(match[2]) if match[2] else _BASES.get(match[3].casefold(), 0)
    return match[1].lstrip("0").casefold(), base


# --- equations and inequalities


def _is_equation(relation: Relation) -> bool:
    return all(operator in "=~" for operator in relation.operators)


def _is_label(side: Answer) -> bool:
    """Tell a name, as `x`, `f(x)`, `\\angle ABC` or `(x,y)`, from a value."""
    match side:
        case Leaf():
            return _LABEL.fullmatch(side.whole) is not None and not values.is_constant(side.whole)
        case Words():
            return True
        case Items(items=items):
            return bool(items) and all(_is_label(item) for item in items)
        case _:
            return False


def _is_assignment(relation: Relation) -> bool:
    first, last = relation.sides[0], relation.sides[-1]
    return _is_equation(relation) and _is_label(first) != (
        _is_label(last) and len(relation.sides) == 2
    )


def _right_sides(relation: Relation) -> list[Answer]:
    """Return an equation's value: the last side, or what the last side only approximates."""
    first, last = relation.sides[0], relation.sides[-1]
    if _is_label(last) and not _is_label(first):
        return [first]
    if relation.operators[-1] != "~":
        return [last]
    exact = relation.sides[-2]
    if _is_label(exact):
        return [last]
    match _near(exact, last):
        case True:
            return [exact, last]
        case False:
            return []
        case None:
            return [last]


def _near(exact: Answer, rounded: Answer) -> bool | None:
    """Return None where a side is no number."""
    if not isinstance(exact, Leaf) or not isinstance(rounded, Leaf):
        return None
    left, right = values.constant(exact.text), values.constant(rounded.text)
    if left is None or right is None:
        return None
    exactly, about = evaluation.real_part(left), evaluation.real_part(right)
    return bool(abs(exactly - about) * 100 <= abs(about))


def _label(relation: Relation) -> str:
    first, last = relation.sides[0], relation.sides[-1]
    side = first if _is_label(first) else last
    return side.whole.strip() if isinstance(side, Leaf) else ""


def _same_relation(gold: Relation, answer: Relation) -> bool:
    equations = _is_equation(gold), _is_equation(answer)
    if equations == (True, True) and _is_assignment(gold) and _is_assignment(answer):
        left, right = _label(gold), _label(answer)
        letters = _VARIABLE.fullmatch(left) and _VARIABLE.fullmatch(right)
        if letters and left != right:
            return False
        return any(same(a, b) for a in _right_sides(gold)[:1] for b in _right_sides(answer))
    if equations[0] != equations[1] or not len(gold.sides) == len(answer.sides) == 2:
        return False
    if is_region(gold) or (equations[0] and _is_assignment(gold) and _is_solved(gold)):
        return False  # the problem itself isn't its solution
    (left, strict), (right, also_strict) = _difference(gold), _difference(answer)
    if left is None or right is None or strict != also_strict:
        return False
    return values.proportional(left, right, positive=strict in ("<", "<="))


def _is_solved(relation: Relation) -> bool:
    value = _right_sides(relation)[0]
    return not isinstance(value, Leaf) or values.is_constant(value.text)


def _difference(relation: Relation) -> tuple[str | None, str]:
    """Write a relation as one that compares a formula with 0."""
    left, right = relation.sides
    if not isinstance(left, Leaf) or not isinstance(right, Leaf):
        return None, ""
    operator = relation.operators[0]
    if operator in (">", ">="):
        left, right, operator = right, left, operator.replace(">", "<")
    return f"({left.whole})-({right.whole})", operator


# --- several parts


def _same_items(gold: Items, answer: Items) -> bool:
    kinds = {gold.kind, answer.kind}
    if len(gold.items) > _MOST_ITEMS or len(answer.items) > 2 * _MOST_ITEMS:
        return False
    if kinds == {"list", "set"} or gold.kind == answer.kind == "set":
        return _matches(_distinct(gold.items), _distinct(answer.items))
    if gold.kind == answer.kind == "list" and _labels(gold) == _labels(answer):
        return _matches(gold.items, answer.items)
    if "set" in kinds or len(gold.items) != len(answer.items):
        return False
    if (
        gold.kind != answer.kind
        and len(kinds - {"list", "()"})
        and not (kinds <= {"[]", "()", "list"} and len(gold.items) > 2)
    ):
        return False
    return all(map(same, gold.items, answer.items))


def _labels(items: Items) -> bool:
    """Find out whether a list gives several variables their values."""
    names = {_label(item) for item in items.items if isinstance(item, Relation)}
    return len(names) > 1


def _distinct(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    kept: list[Answer] = []
    for item in items:
        if not any(same(other, item) for other in kept):
            kept.append(item)
    return tuple(kept)


def _matches(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool:
    """Find another partner for each part, in any order."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for item in gold:
        partner = next((at for at, other in enumerate(left) if same(item, other)), None)
        if partner is None:
            return False
        del left[partner]
    return True


def _same_matrix(gold: Matrix, answer: Matrix) -> bool:
    if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
        return False
    return all(
        same(left, right)
        for above, below in zip(gold.rows, answer.rows, strict=True)
        for left, right in zip(above, below, strict=True)
    )


def _is_vector(matrix: Matrix, items: Items) -> bool:
    """Compare a row or a column with a tuple."""
    if len(matrix.rows) != 1 and any(len(row) != 1 for row in matrix.rows):
        return False
    entries = [entry for row in matrix.rows for entry in row]
    if items.kind not in ("()", "[]") or len(entries) != len(items.items):
        return False
    return all(map(same, items.items, entries))


def _same_ratio(gold: Ratio, answer: Ratio) -> bool:
    if len(gold.parts) != len(answer.parts):
        return False
    if _is_time(gold):
        return all(map(same, gold.parts, answer.parts))
    first, other = gold.parts[0], answer.parts[0]
    if not isinstance(first, Leaf) or not isinstance(other, Leaf):
        return False
    return all(
        isinstance(left, Leaf)
        and isinstance(right, Leaf)
        and values.same_formula(
            rf"({left.text})\cdot ({other.text})", rf"({right.text})\cdot ({first.text})"
        )
        for left, right in zip(gold.parts[1:], answer.parts[1:], strict=True)
    )


def _is_time(ratio: Ratio) -> bool:
    """Take 3:30 for a time and 3:4 for a ratio."""
    hour, minute = ratio.parts[0], ratio.parts[1]
    return (
        isinstance(hour, Leaf)
        and isinstance(minute, Leaf)
        and re.fullmatch(r"[0-2]?\d", hour.text) is not None
        and re.fullmatch(r"[0-5]\d", minute.text) is not None
    )


def _is_quotient(parts: tuple[Answer, ...], other: Leaf) -> bool:
    above, below = parts
    if not isinstance(above, Leaf) or not isinstance(below, Leaf):
        return False
    quotient = rf"\frac{{{above.text}}}{{{below.text}}}"
    return _same_leaf(replace(above, text=quotient, whole=quotient), other)


def _same_residue(gold: Residue, answer: Answer) -> bool:
    if not isinstance(answer, Residue):
        return same(gold.value, answer)
    if not same(gold.modulus, answer.modulus):
        return False
    left, right = (
        _right_sides(part)[0] if isinstance(part, Relation) else part
        for part in (gold.value, answer.value)
    )
    parsed = [
        numbers.parse_number(part.text) if isinstance(part, Leaf) else None
        for part in (left, right, gold.modulus)
    ]
    if None in parsed:
        return same(left, right)
    first, second, modulus = (number.value for number in parsed if number)
    return modulus != 0 and (first - second) % modulus == 0
