"""Compute a formula's value, exactly if it has fractions only; refuse what would take long."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any
from zlib import crc32

import sympy
from mpmath import MPContext  # pyright: ignore[reportAttributeAccessIssue]
from sympy.core.function import AppliedUndef

# bits of a power, and the largest factorial
_BITS = 60_000
_FACTORIAL = 2000

mp: Any = MPContext()
mp.dps = 50
Value = Any  # a fraction, or mpmath's complex number
Tree = Any  # sympy's


class NoValue(Exception):
    """A formula has no value at a point, or one that would take long."""


def value_of(tree: Tree, point: dict[str, Value], *, real: bool = False) -> Value:
    """Compute a formula, exactly if it has fractions only, and refuse what would take long.

    With `real`, everything in it has to be real.
    """
    value = _computed(tree, point, real)
    if not isinstance(value, Fraction) and (mp.isnan(value.real) or mp.isnan(value.imag)):
        raise NoValue
    if real and not is_real(value):
        raise NoValue
    return value


def _computed(tree: Tree, point: dict[str, Value], real: bool) -> Value:
    if isinstance(tree, sympy.Rational):
        return Fraction(int(tree.p), int(tree.q)) if tree.q else _refuse()
    if isinstance(tree, sympy.Symbol):
        return mp.mpc(0, 1) if tree.name == "i" else point[tree.name]
    if tree in _CONSTANTS:
        return _CONSTANTS[tree]
    name = type(tree).__name__
    if name not in _FUNCTIONS and not isinstance(tree, AppliedUndef):
        raise NoValue
    arguments = [value_of(argument, point, real=real) for argument in tree.args]
    if isinstance(tree, AppliedUndef):  # some value that depends on its arguments alone
        return choose(f"{name}{[mp.nstr(as_float(a), 15) for a in arguments]}", 0, 1)
    try:
        return _FUNCTIONS[name](*arguments)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise NoValue from error


def _refuse() -> Any:
    raise NoValue


def as_float(value: Value) -> Value:
    if isinstance(value, Fraction):
        return mp.mpc(mp.mpf(value.numerator) / value.denominator)
    return value


def _sum(*terms: Value) -> Value:
    if not all(isinstance(term, Fraction) for term in terms):
        terms = tuple(as_float(term) for term in terms)
    return sum(terms[1:], terms[0])


def _product(*factors: Value) -> Value:
    if not all(isinstance(factor, Fraction) for factor in factors):
        factors = tuple(as_float(factor) for factor in factors)
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
        if isinstance(product, Fraction) and _bits(product) > _BITS:
            raise NoValue
    return product


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        if base in (1, -1):
            return base if exponent.numerator % 2 else base * base
        if abs(exponent) * max(1, _bits(base) - 1) > _BITS:
            raise NoValue
        return base**exponent.numerator
    if (
        isinstance(exponent, Fraction)
        and exponent.denominator % 2
        and exponent.denominator > 1
        and is_real(base)
        and as_float(base).real < 0
    ):  # the real root
        root = as_float(-base) ** as_float(Fraction(1, exponent.denominator))
        return _power(-root, Fraction(exponent.numerator))
    if base == 0:
        return Fraction(0) if as_float(exponent).real > 0 else _refuse()
    return (
        _exponential(mp.log(as_float(base)) * as_float(exponent))
        if not _is_square(exponent)
        else mp.sqrt(as_float(base))
    )


def _is_square(exponent: Value) -> bool:
    return exponent == Fraction(1, 2)


def _exponential(exponent: Value) -> Value:
    exponent = as_float(exponent)
    if abs(exponent) > _BITS:
        raise NoValue
    return mp.exp(exponent)


def _factorial(argument: Value) -> Value:
    if not isinstance(argument, Fraction) or argument.denominator != 1:
        return mp.gamma(as_float(argument) + 1) if abs(as_float(argument)) < 100 else _refuse()
    if not 0 <= argument <= _FACTORIAL:
        raise NoValue
    product = 1
    for factor in range(2, argument.numerator + 1):
        product *= factor
    return Fraction(product)


def _logarithm(argument: Value, base: Value | None = None) -> Value:
    logarithm = mp.log(as_float(argument))
    return logarithm if base is None else logarithm / mp.log(as_float(base))


def _whole(round_down: bool) -> Callable[[Value], Value]:
    def rounded(value: Value) -> Value:
        if not is_real(value):
            raise NoValue
        real = value if isinstance(value, Fraction) else value.real
        return Fraction(int(mp.floor(_real(real)) if round_down else mp.ceil(_real(real))))

    return rounded


def _real(value: Value) -> Value:
    return as_float(value).real if isinstance(value, Fraction) else value


def _extreme(choose: Callable[..., Value]) -> Callable[..., Value]:
    def extreme(*values: Value) -> Value:
        return choose(values, key=lambda value: as_float(value).real)

    return extreme


def _magnitude(value: Value) -> Value:
    return abs(value) if isinstance(value, Fraction) else mp.mpc(abs(value))


def _function(name: str) -> Callable[[Value], Value]:
    def call(argument: Value) -> Value:
        argument = as_float(argument)
        if abs(argument) > 1e9:
            raise NoValue
        return mp.mpc(getattr(mp, name)(argument))

    return call


_CONSTANTS: dict[Any, Value] = {
    sympy.pi: mp.mpc(mp.pi),
    sympy.E: mp.mpc(mp.e),
    sympy.I: mp.mpc(0, 1),
    sympy.oo: mp.mpc(mp.inf),
    -sympy.oo: mp.mpc(-mp.inf),
}
_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "Add": _sum,
    "Mul": _product,
    "Pow": _power,
    "exp": _exponential,
    "log": _logarithm,
    "factorial": _factorial,
    "Abs": _magnitude,
    "floor": _whole(True),
    "ceiling": _whole(False),
    "Max": _extreme(max),
    "Min": _extreme(min),
    **{
        name: _function(name)
        for name in re.findall(
            r"\w+",
            "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh",
        )
    },
}


def is_real(value: Value) -> bool:
    return isinstance(value, Fraction) or abs(value.imag) <= 1e-30 * max(1, abs(value.real))


def close(left: Value, right: Value) -> bool:
    """Compare two values, exactly if both are fractions."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = as_float(left), as_float(right)
    if mp.isinf(left) or mp.isinf(right):
        return bool(left == right)
    return bool(abs(left - right) <= 1e-30 * max(abs(left), abs(right)) + mp.mpf("1e-44"))


def real_part(value: Value) -> Value:
    return as_float(value).real


def choose(name: str, seed: int, sign: int) -> Value:
    draw = crc32(f"{seed} {name}".encode())
    if name in ("n", "k", "m", "N"):  # (-1)^n is cos(n pi) for integers
        return Fraction(2 + draw % 17)
    return sign * (mp.mpf(draw % 1_000_003) / 400_000 + mp.mpf(1) / 7)
