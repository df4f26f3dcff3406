"""Separate a number from its unit, and compare units."""

import re
from dataclasses import dataclass
from fractions import Fraction

from tlt.rewards.math.normalization import DEGREE, PERCENT

# names of a unit, what it measures, and how many of that measure's units it is
_TABLE = """
length   1/1000   mm millimeter millimetre
length   1/100    cm centimeter centimetre
length   1        m meter metre
length   1000     km kilometer kilometre
inch     1        in inch inche
inch     12       ft foot feet
inch     36       yd yard
inch     63360    mi mile
mass     1/1000   mg milligram
mass     1        g gram
mass     1000     kg kilogram
pound    1        lb pound
pound    1/16     oz ounce
time     1        s sec second
time     60       min minute
time     3600     h hr hour
time     86400    day
time     604800   week
month    1        month
month    12       yr year
volume   1/1000   ml milliliter millilitre
volume   1        l liter litre
money    1/100    cent ¢
money    1        $ dollar usd us$
euro     1        € euro eur
sterling 1        £ gbp
yen      1        ¥ yen
rupee    1        ₹ rupee rs
angle    1        ° degree
radian   1        rad radian
celsius  1        °c celsiu celsius
kelvin   1        kelvin
fahrenheit 1      °f fahrenheit
share    1        %
am       1        am a.m.
pm       1        pm p.m.
square   1        unit^2
cube     1        unit^3
newton   1        n newton
joule    1        j joule
watt     1        w watt
volt     1        v volt
hertz    1        hz hertz
mole     1        mol mole
"""
_NAMES = {
    name: (measure, Fraction(factor))
    for line in _TABLE.strip().splitlines()
    for measure, factor, *names in [line.split()]
    for name in names
}
# without a number's space before them, these are variables
_SHORT = frozenset(["m", "g", "s", "h", "l", "n", "j", "w", "v"])
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_SPEEDS = {"mph": "mile/hour", "kmph": "km/hour", "kph": "km/hour"}
_TAIL = re.compile(
    r"(?P<value>.*?[\d})!]|.*\\pi)\s*(?P<unit>(?:\\text\{(?:[^{}]|\{\d\})*\}|[%°$]|(?<=\s)[a-zA-Z]|[a-zA-Z¢€£]{2})"
    r"(?:\\text\{(?:[^{}]|\{\d\})*\}|\^\{?[-\d]+\}?|\\cdot(?![a-zA-Z])|[a-zA-Z°%€£/.'()\s,-])*)",
    re.DOTALL,
)
_PREFIX = re.compile(
    r"(?P<sign>-?)\s*(?:(?P<unit>[$€£¥₹]|Rs\.?\s|USD\s|US\$)\s*)(?P<value>-?\s*[\d.\\(].*)",
    re.DOTALL,
)
_WORD = re.compile(r"[a-z¢$€£¥₹°%.]+")


@dataclass(frozen=True)
class Unit:
    # powers of measures, or no measure for words that name none
    measures: tuple[tuple[str, int], ...] = ()
    factor: Fraction = Fraction(1)


NONE = Unit()
SHARE = Unit((("share", 1),))


def split_unit(text: str) -> tuple[str, Unit]:
    """Return a number or formula without what follows it, and the unit that this names."""
    if prefix := _PREFIX.fullmatch(text):
        value, unit = split_unit(prefix["sign"] + prefix["value"])
        named = parse_unit(prefix["unit"])
        return value, unit if unit != NONE and unit.measures == named.measures else named
    match = _TAIL.fullmatch(text)
    if match is None:
        return text, NONE
    tail = match["unit"]
    if tail.startswith(DEGREE) and re.search(r"\\(?:sin|cos|tan|sec|csc|cot)", match["value"]):
        return text, NONE
    bare = re.sub(r"\\text\{((?:[^{}]|\{\d\})*)\}", r" \1 ", tail).strip()
    attached = not text[match.end("value") : match.start("unit")]
    if "\\text" not in tail and not _names_unit(bare, match["value"], attached=attached):
        return text, NONE
    value = match["value"].strip()
    return value, parse_unit(bare)


def _names_unit(bare: str, value: str, *, attached: bool) -> bool:
    """Tell the words after a number from variables: `5 cm`, but `5m` and `2 xy`."""
    first = re.match(r"[a-zA-Z]+|.", bare)
    word = first[0].lower() if first else ""
    if _lookup(word) or word in _SPEEDS:
        return not (attached and word in _SHORT)
    if re.search(r"[(),=]", bare) and len(word) < 3:
        return False
    in_numbers = not re.search(r"[a-zA-Z]", re.sub(r"\\(?:frac|sqrt|pi|times|cdot)", "", value))
    return not attached and len(word) >= 3 and in_numbers


def parse_unit(text: str) -> Unit:
    """Read `cm^2`, `square feet`, `km/h` or `miles per hour`; other words are no unit."""
    text = re.sub(r"\\cdot|[{}]", " ", text).lower().replace(PERCENT, " % ")
    text = text.replace(f"{DEGREE} ", DEGREE).strip()
    text = text.replace("°celsius", "°c").replace("°fahrenheit", "°f")
    measures: dict[str, int] = {}
    factor, last, sign, wanted = Fraction(1), Fraction(1), 1, 1
    for token in re.findall(r"/|\^\s*-?\d|[a-z¢$€£¥₹°%.]+", text):
        if token == "/" or token == "per":
            sign = -1
        elif token.startswith("^") or token in ("squared", "cubed"):
            power = _POWERS.get(token) or int(token[1:])
            if measures:
                name = list(measures)[-1]
                factor *= last ** (power - 1)
                measures[name] += (power - 1) * (1 if measures[name] > 0 else -1)
        elif token in _POWERS:
            wanted = _POWERS[token]
        elif token in _SPEEDS:
            return parse_unit(_SPEEDS[token])
        elif found := _lookup(token):
            last = found[1] ** sign
            measures[found[0]] = measures.get(found[0], 0) + sign * wanted
            factor *= last**wanted
            wanted = 1
        else:
            break
    return Unit(tuple(sorted(measures.items())), factor)


def _lookup(word: str) -> tuple[str, Fraction] | None:
    word = word if word in _NAMES else word.rstrip(".")
    return _NAMES.get(word) or _NAMES.get(word.removesuffix("s"))


def conversion(gold: Unit, answer: Unit) -> Fraction | None:
    """Return what an answer has to be multiplied by to be in the gold's unit; None if it can't."""
    if NONE in (gold, answer) or not gold.measures or not answer.measures:
        return Fraction(1)
    return answer.factor / gold.factor if gold.measures == answer.measures else None
