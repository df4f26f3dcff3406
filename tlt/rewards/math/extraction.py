"""Find the answer in a completion, and in what a data set has as the right answer."""

import re

from tlt.rewards.math.normalization import closing

# a box, a marker or a number further from the end isn't looked for
_TAIL = 4000
_MOST_BOXES = 8
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])")
_MARKER = re.compile(
    r"####|(?:final\s+)?answer(?:\s+to\s+[^.\n:]{0,60}?)?\s*(?:\*\*)?\s*(?:is(?!\s*n[o']t)|:|=)\s*(?:\*\*)?\s*:?"
    r"|(?:answers|solutions?|roots)\s+(?:is|are)(?!\s+not)\s*:?"
    r"|(?:therefore|thus|hence|so),?\s+the\s+[^.\n]{0,60}?\s+is\s*:?(?=\s*[$\\\d-])",
    re.I,
)
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$])\$(?![\s$])([^$\n]{1,400}?)(?<![\s\\])\$(?!\d)",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?<![\w.^{/\\])[-−]?\s?[$€£]?\s?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
    r"(?:\s+\d+/\d+|\s*/\s*\d+)?\s*%?"
)
_BETWEEN = re.compile(r"\s*(?:,|;|and|or|,\s*and|,\s*or)\s*", re.I)
_REASON = re.compile(
    r"[,;]?\s+(?:because|since|as|so|which|where|when|not|rather|instead|but)\s"
    r"|(?<=\S)[.!?](?:\s|$)|\n",
    re.I,
)
_ADVERBS = re.compile(
    r"^(?:(?:therefore|thus|then|simply|just|indeed|exactly|precisely|equal to|equals|given by)"
    r"[,:]?\s+)+",
    re.I,
)
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_LETTER = re.compile(
    r"\(([A-Ja-j])\)|\*\*([A-J])\b|\b(?:option|choice|answer)(?:\s+is)?:?\s+\**\(?([A-J])\b|^\W*([A-J])\W*$",
    re.M,
)


def final_answers(text: str, *, letter: bool = False) -> list[str]:
    """Return the last box, after the boxes of its sentence as one list; else what is said last.

    A text whose last box isn't closed has no answer.
    """
    if boxes := list(_BOX.finditer(text)):
        return _boxed(text, [box.span() for box in boxes[-_MOST_BOXES:]])
    return _unboxed(text[-_TAIL:], letter=letter)


def gold_text(gold: object) -> str:
    """Return the right answer of a data set's column, which may be a whole solution."""
    if isinstance(gold, float):
        return str(int(gold)) if gold.is_integer() and abs(gold) < 2**53 else f"{gold:.12g}"
    text = str(gold).strip()
    if "####" in text:
        return text.rpartition("####")[2].strip()
    if boxes := list(_BOX.finditer(text)):
        return (_boxed(text, [box.span() for box in boxes[-_MOST_BOXES:]]) or [""])[-1]
    return text


def _boxed(text: str, boxes: list[tuple[int, int]]) -> list[str]:
    """Return the last box's content, and before it the list of those in the same sentence."""
    contents: list[str] = []
    begin = len(text)
    for start, end in reversed(boxes):
        content, after = _content(text, end)
        if content is None:
            break
        if contents and not _same_sentence(text[after:begin]):
            break
        contents.insert(0, content)
        begin = start
    if not contents or not contents[-1].strip():
        return []
    distinct = list(dict.fromkeys(contents))
    together = [", ".join(distinct)] if len(distinct) > 1 and all(distinct) else []
    return [*together, contents[-1]]


def _content(text: str, at: int) -> tuple[str | None, int]:
    while text[at : at + 1].isspace():
        at += 1
    if text[at : at + 1] != "{":
        bare = re.compile(r"\\[a-zA-Z]+(?:\{[^{}]*\}|\d)*|-?\d+(?:\.\d+)?|\w").match(text, at)
        return (bare[0], bare.end()) if bare else (None, at)
    end = closing(text, at)
    return (None, at) if end < 0 else (text[at + 1 : end - 1], end)


def _same_sentence(between: str) -> bool:
    return len(between) < 80 and not re.search(r"\n\s*\n|[.!?](?:\s|$)|\d", between)


def _unboxed(text: str, *, letter: bool) -> list[str]:
    text = re.sub(r"(?<![\w*)\\])\*\*(?=\S)([^*\n]+?)(?<=\S)\*\*(?![\w*(])", r"\1", text)
    markers = list(_MARKER.finditer(text))
    if markers:
        rest = text[markers[-1].end() :].strip()
        answer = _stated(rest)
        if answer:
            return [answer]
    if letter and (letters := _LETTER.findall(text)):
        return ["".join(letters[-1])]
    lines = text.strip().splitlines()
    if (
        len(lines) == 1
        and len(lines[0]) <= 60
        and not (_has_words(text) and (_NUMBER.search(text) or _FORMULA.search(text)))
    ):
        return [lines[0]]
    return _last(text)


def _has_words(text: str) -> bool:
    return _WORD.search(re.sub(r"\\text\{[^{}]*\}", "", text)) is not None


def _stated(rest: str) -> str:
    """Return what a sentence says after "the answer is": its formulas, or its words."""
    formulas = list(_FORMULA.finditer(rest))
    line = rest.partition("\n\n")[0]
    if formulas and formulas[0].start() < len(line) and len(formulas[0].group(0)) > 0:
        before = rest[: formulas[0].start()]
        if len(before) < 60 and not re.search(r"[.!?]\s|\d", before):
            return _together(rest, formulas)
    first = rest.lstrip("\n ").partition("\n")[0] if rest.strip() else ""
    cut = _REASON.search(first)
    return _ADVERBS.sub("", (first[: cut.start()] if cut else first).strip(" *:"))


def _together(text: str, formulas: list[re.Match[str]]) -> str:
    """Join the first formula and those that follow it with a comma, `and` or `or`."""
    parts = [_inner(formulas[0])]
    end = formulas[0].end()
    for formula in formulas[1:]:
        if not _BETWEEN.fullmatch(text[end : formula.start()]):
            break
        parts.append(_inner(formula))
        end = formula.end()
    tail = re.match(r"\s*(?:\\?%|[a-zA-Z°][^.,;:!?\n$\\]{0,30})", text[end:])
    unit = tail[0] if tail and len(parts) == 1 else ""
    return ", ".join(parts) + unit


def _inner(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


def _last(text: str) -> list[str]:
    """Return the last formula, right side or number, whichever ends later."""
    formulas = list(_FORMULA.finditer(text))
    numbers = [match for match in _NUMBER.finditer(text) if re.search(r"\d", match[0])]
    if formulas and (not numbers or numbers[-1].end() <= formulas[-1].end()):
        return [_inner(formulas[-1])]
    line = text.strip().rpartition("\n")[2]
    _, equals, right = line.rpartition("=")
    if equals and re.search(r"\d", right) and not _has_words(right):
        return [right.strip()]
    return [numbers[-1][0].strip(" ,")] if numbers else []
