"""Read the structure of an answer: lists, tuples, sets, intervals, relations, matrices, words."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from tlt.rewards.math.normalization import ROW, normalize
from tlt.rewards.math.units import NONE, Unit, split_unit


@dataclass(frozen=True)
class Leaf:
    """Hold a number or a formula, without its unit, and the whole as it was written."""

    text: str
    unit: Unit
    whole: str


@dataclass(frozen=True)
class Words:
    text: str


@dataclass(frozen=True)
class Items:
    """Hold the parts of a bare list, a set, or what is in brackets: a tuple or an interval."""

    kind: Literal["list", "set", "()", "[]", "(]", "[)"]
    items: tuple["Answer", ...]
    # what stood between a list's items: "," or "and" or "or"
    joint: str = ","


@dataclass(frozen=True)
class Joined:
    """Hold the parts of a union, or a set and what is taken out of it."""

    operator: Literal["cup", "cap", "setminus"]
    parts: tuple["Answer", ...]


@dataclass(frozen=True)
class Relation:
    """Hold the sides of `1 < x <= 2` and the operators between them."""

    sides: tuple["Answer", ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple["Answer", ...], ...]


@dataclass(frozen=True)
class Ratio:
    parts: tuple["Answer", ...]


@dataclass(frozen=True)
class Residue:
    value: "Answer"
    modulus: "Answer"


Answer = Leaf | Words | Items | Joined | Relation | Matrix | Ratio | Residue

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING = frozenset(["(", "[", "{", r"\{", r"\lfloor", r"\lceil"])
_CLOSING = frozenset([")", "]", "}", r"\}", r"\rfloor", r"\rceil"])
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", r"\leq": "<=", r"\geq": ">=", r"\neq": "!=", r"\approx": "~",
    r"\equiv": "=", r"\to": "=", r"\mapsto": "=",
    r"\rightarrow": "=", r"\implies": "=", r"\Rightarrow": "=",
}  # fmt: skip
_JOINTS = {",": ",", ";": ",", r"\land": "and", r"\lor": "or"}
_MATRIX = re.compile(
    r"[\[(]?\s*\\begin\{([pb]?(?:small)?matrix|array)\}\s*(?:\{[lcr| ]*\})?"
    r"(.*?)\\end\{\1\}\s*[\])]?",
    re.DOTALL,
)
_MODULO = re.compile(
    r"(.*?)\s*\(?\s*(?:\\pmod|\\bmod|\\mod|(?<=[\s(])mod|\\text\{\s*mod\s*\}?)\s*\{?\s*([^{})]+)\s*[})]*"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[\s'.:&-]|\d(?=\w))*")
_LETTERS = frozenset("xyzabcnkmpABCXYZ")
_NOTHING = frozenset(
    [
        "no solution",
        "no solutions",
        "no real solution",
        "no real solutions",
        "empty set",
        "the empty set",
    ]
)
# `n \in \mathbb{Z}` after a family of solutions
_CONDITION = re.compile(
    r"[a-zA-Z]\s*\\in(?![a-zA-Z])\s*\\(?:mathbb|text)|\\text\{(?:where|for|with)\b"
)
_ALL_EXCEPT = re.compile(
    r"(?:\\text\{)?\s*(?:the )?(?:set of )?(?:all )?(?:reals|real numbers)(?: [a-z])?,?\s*\}?\s*"
    r"(?:\\text\{\s*)?(?:except|excluding|other than)(?: for)?\s*\}?\s*(.*[\d\\].*)",
    re.IGNORECASE,
)
_LABELLED = re.compile(r"(?:\\text\{[^{}]*:?\}|[A-Za-z][A-Za-z ]{2,}:)\s*(?=[-$\\\d(.])")


def read(text: str) -> Answer | None:
    """Read an answer; None if it is empty."""
    text = normalize(text)
    return parse(text) if text else None


def readings(text: str) -> list[str]:
    """Return an answer with its commas as they are, and as thousands if they can be."""
    normal = normalize(text)
    joined = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), normal)
    return [joined] if joined == normal else [joined, normal]


def gold_reading(text: str) -> str:
    """Return the one reading of the right answer: 1,000 is a number, and (100,200) is a pair."""
    joined, *others = readings(text)
    if not others or not re.match(r"\s*(?:[(\[]|\\\{)", joined):
        return joined
    normal = others[0]
    spaced = re.search(r",\s", normal) is not None
    zeros = re.search(r",0\d\d", normal) is not None
    return joined if spaced or zeros else normal


def parse(text: str) -> Answer:
    if excepted := _ALL_EXCEPT.fullmatch(text.strip()):
        return _all_except(excepted[1])
    text = _unwrapped(text.strip())
    if joined := _split(
        text, {r"\cup": "cup", r"\cap": "cap", r"\setminus": "setminus", r"\backslash": "setminus"}
    ):
        parts, operators = joined
        operator = operators[0]
        if all(other == operator for other in operators) and all(parts):
            return Joined(operator, tuple(parse(part) for part in parts))  # pyright: ignore[reportArgumentType]
    if enclosed := _enclosed(text):
        return enclosed
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in matrix[2].split(ROW) if row.strip()]
        return Matrix(tuple(tuple(parse(cell) for cell in row.split("&")) for row in rows))
    if listed := _split(text, _JOINTS):
        return _list(*listed)
    if members := re.fullmatch(r"[^,=<>\\{}()]{1,12}(?:\([a-z]\))?\s*\\in(?![a-zA-Z])(.+)", text):
        return parse(members[1])
    if modulo := _MODULO.fullmatch(text):
        return Residue(parse(modulo[1]), parse(modulo[2]))
    if related := _split(text, _RELATIONS):
        return _relation(*related)
    if (ratio := _split(text, {":": ":"})) and all(ratio[0]):
        parts, _ = ratio
        last, unit = split_unit(parts[-1])
        if all(re.search(r"[\dA-Za-z]", part) for part in parts) and not re.match(r"\\text", text):
            return Ratio((*(parse(part) for part in parts[:-1]), replace_unit(parse(last), unit)))
    if re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text):
        return _both_signs(text)
    return _leaf(text)


def _all_except(text: str) -> Answer:
    """Return the real numbers without some: 2, or x = 2, or a list of these."""
    opened = text.count("}") > text.count("{")
    left_out = parse(text.replace("}", "", 1) if opened else text)
    parts = left_out.items if isinstance(left_out, Items) else (left_out,)
    numbers = [part.sides[-1] if isinstance(part, Relation) else part for part in parts]
    return Joined("setminus", (Words("all real numbers"), Items("set", tuple(numbers))))


def replace_unit(answer: Answer, unit: Unit) -> Answer:
    return replace(answer, unit=unit) if isinstance(answer, Leaf) else answer


def tokens(text: str) -> list[str]:
    return _TOKEN.findall(text)


def _split(text: str, separators: dict[str, str]) -> tuple[list[str], list[str]] | None:
    """Split outside of brackets and environments; None if nothing separates."""
    parts, found, depth = [""], [], 0
    for token in tokens(text):
        if token in _OPENING or token == r"\begin":
            depth += 1
        elif token in _CLOSING or token == r"\end":
            depth -= 1
        if depth == 0 and token in separators:
            found.append(separators[token])
            parts.append("")
        else:
            parts[-1] += token
    return ([part.strip() for part in parts], found) if found else None


def _match_end(text: str) -> tuple[int, str, str] | None:
    """Return where the bracket at the start is closed, if it is, and both brackets."""
    depth, at, opening = 0, 0, ""
    for token in tokens(text):
        if token in _OPENING:
            opening = opening or token
            depth += 1
        elif token in _CLOSING:
            depth -= 1
        if not opening:
            return None
        at += len(token)
        if depth == 0:
            return at, opening, token
    return None


def _unwrapped(text: str) -> str:
    """Drop what surrounds the whole: braces, a second pair of parentheses, a label in words."""
    while (found := _match_end(text)) and found[0] == len(text):
        _, opening, closing = found
        inner = text[len(opening) : -len(closing)].strip()
        if opening == "{" or (
            opening == "(" and closing == ")" and not _split(inner, _JOINTS) and len(inner) > 1
        ):
            text = inner
        else:
            break
    label = _LABELLED.match(text)
    return text[label.end() :] if label and label.end() < len(text) else text


def _enclosed(text: str) -> Answer | None:
    """Read what is in brackets as a whole: a set, a tuple or an interval."""
    found = _match_end(text)
    if (text.startswith("]") and text[-1:] in "[]") or (found is None and text.endswith("[")):
        return _french(text)
    if not found or found[0] != len(text):
        return None
    _, opening, closing = found
    inner = text[len(opening) : -len(closing)].strip()
    if opening == r"\{":
        builder = re.fullmatch(r"[^|:,=<>]{1,20}(?:\||:)(.+)", inner)
        if builder and re.search(r"[<>=]|\\(?:leq|geq|neq|in)", builder[1]):
            return parse(builder[1])
        listed = _split(inner, _JOINTS)
        parts = listed[0] if listed else [inner]
        return Items("set", tuple(_flat(parse(part) for part in parts if part)))
    listed = _split(inner, {",": ",", ";": ","})
    if not listed or opening not in ("(", "["):
        return None
    parts = listed[0]
    kind = opening + closing
    if kind not in ("()", "[]", "(]", "[)") or not all(parts):
        return None
    return Items(kind, tuple(parse(part) for part in parts))  # pyright: ignore[reportArgumentType]


def _french(text: str) -> Answer | None:
    """Read ]0,1[ as (0,1)."""
    swapped = {"]": "(", "[": "["}.get(text[0]), {"[": ")", "]": "]"}.get(text[-1])
    if None in swapped or "[" in text[1:-1] or "]" in text[1:-1]:
        return None
    return _enclosed(f"{swapped[0]}{text[1:-1]}{swapped[1]}")


def _flat(items: "list[Answer] | object") -> list[Answer]:
    flat: list[Answer] = []
    for item in items:  # pyright: ignore
        flat += item.items if isinstance(item, Items) and item.kind == "list" else [item]
    return flat


def _list(parts: list[str], joints: list[str]) -> Answer:
    items = _flat([parse(part) for part in parts if part and not _CONDITION.match(part)])
    if len(items) == 1:
        return items[0]
    if not items:
        return Words(" ".join(parts))
    joint = "and" if "and" in joints and "or" not in joints else "or" if "or" in joints else ","
    # 3, 4 cm: the unit is of both
    last = items[-1]
    if isinstance(last, Leaf) and last.unit != NONE:
        items = [
            replace(item, unit=last.unit) if isinstance(item, Leaf) and item.unit == NONE else item
            for item in items
        ]
    return Items("list", tuple(items), joint)


def _relation(parts: list[str], operators: list[str]) -> Answer:
    """Read an equation or inequality; `=` without a left side is nothing."""
    if not all(parts):
        rest = [part for part in parts if part]
        return parse(rest[0]) if len(rest) == 1 else Words(" ".join(parts))
    return Relation(tuple(parse(part) for part in parts), tuple(operators))


def _both_signs(text: str) -> Answer:
    plus = re.sub(r"\\pm(?![a-zA-Z])", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", text))
    minus = re.sub(r"\\pm(?![a-zA-Z])", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", text))
    return Items("list", (parse(plus), parse(minus)), "or")


def _leaf(text: str) -> Answer:
    words = plain_words(text)
    if words in _NOTHING or text == r"\emptyset":
        return Items("set", ())
    if is_words(text):
        return Words(words)
    value, unit = split_unit(text)
    return Leaf(_unwrapped(value), unit, text)


def plain_words(text: str) -> str:
    """Return an answer in words, without \\text, case, article and full stop."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).casefold()
    return re.sub(
        r"^(?:the|a|an) (?=\w{2})", "", " ".join(re.sub(r"[.,!\"'`*]", " ", text).split())
    )


def is_words(text: str) -> bool:
    """Tell words from a product of variables, which has few letters and no \\text."""
    opened = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip()
    runs = re.findall(r"[^\W\d_]+", opened)
    if not _WORDS.fullmatch(opened) or max(map(len, runs), default=0) < 2:
        return False
    return r"\text" in text or len(opened) > 4 or not set(opened) <= _LETTERS
