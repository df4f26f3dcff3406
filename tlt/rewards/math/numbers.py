"""Read numbers exactly, and compare them by the digits that they are given with."""

import re
from dataclasses import dataclass
from fractions import Fraction

from tlt.rewards.math.evaluation import Value, real_part

# a decimal with so many digits may stand for the number that it rounds
ROUNDED_DIGITS = 6


@dataclass(frozen=True)
class Number:
    value: Fraction
    # the worth of a decimal's last digit, and how many significant digits it has
    last: Fraction | None = None
    digits: int = 0

    def scaled(self, factor: Fraction) -> "Number":
        last = None if self.last is None else self.last * factor
        return Number(self.value * factor, last, self.digits)


_NUMBER = re.compile(r"([+-]?)\s*(\d{1,4000})?(?:\.(\d{0,4000}))?")
_SCIENTIFIC = re.compile(r"(.*\d)\s*\\(?:times|cdot)\s*10\^\{([+-]?\d{1,3})\}")
_FRACTION = re.compile(
    r"([+-]?)\s*(?:\\frac\{\s*([+-]?\d{1,999})\s*\}\{\s*(\d{1,999})\s*\}|(\d{1,999})\s*/\s*(\d{1,999}))"
)


def parse_number(text: str) -> Number | None:
    """Read an integer, a decimal, a fraction or a number in scientific notation."""
    text = text.strip()
    if scientific := _SCIENTIFIC.fullmatch(text):
        mantissa = parse_number(scientific[1])
        return mantissa.scaled(Fraction(10) ** int(scientific[2])) if mantissa else None
    if fraction := _FRACTION.fullmatch(text):
        above, below = int(fraction[2] or fraction[4]), int(fraction[3] or fraction[5])
        sign = -1 if fraction[1] == "-" else 1
        return Number(Fraction(sign * above, below)) if below else None
    match = _NUMBER.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return None
    whole, decimals = match[2] or "", match[3] or ""
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    value = -value if match[1] == "-" else value
    if not decimals:
        return Number(value)
    return Number(value, Fraction(1, 10 ** len(decimals)), len((whole + decimals).lstrip("0")))


def same_number(left: Number, right: Number) -> bool:
    """Compare exactly, but let a decimal of six digits stand for what it rounds."""
    return left.value == right.value or rounds(left, right.value) or rounds(right, left.value)


def rounds(decimal: Number, exact: Value) -> bool:
    if decimal.last is None or decimal.digits < ROUNDED_DIGITS:
        return False
    if isinstance(exact, Fraction):
        error = abs(exact) - abs(decimal.value)
        half, last, same_sign = decimal.last / 2, decimal.last, exact * decimal.value >= 0
    else:
        if abs(exact.imag) > 1e-30:
            return False
        error = abs(exact.real) - abs(real_part(decimal.value))
        half, last = real_part(decimal.last / 2), real_part(decimal.last)
        same_sign = exact.real * real_part(decimal.value) >= 0
    # rounded or cut off
    return bool(same_sign and -half <= error < last)
