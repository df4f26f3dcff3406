"""Read a formula into a tree by math-verify's parser, without computing anything.

What the parser would compute at once, or read for minutes, is refused or rewritten before.
"""

import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from tlt.rewards.math.normalization import DEGREE, closing

# characters of a formula, and nested brackets
_LONGEST = 600
_DEEPEST = 8
_MOST_BARS = 8
Tree = Any  # sympy's

# what a formula may have; a command that the parser would compute at once isn't among them
_COMMANDS = frozenset(
    re.findall(
        r"\w+",
        """frac sqrt pi cdot times div sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh
        ln log exp max min lfloor rfloor lceil rceil infty angle triangle ell vec hat overline bar
        tilde alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma
        tau upsilon phi chi psi omega Delta Theta Lambda Xi Pi Sigma Phi Psi Omega sum prod int
        lim to""",
    )
)
_REFUSED = re.compile(
    r"""['"&!]{3}|['"&;]|\|_|\d_|\\[^a-zA-Z]|\d{1000}|[^\x00-\x7f]|[a-zA-Z]{12}"""
)
_ATOM = re.compile(r"\\[a-zA-Z]+|\d+(?:\.\d*)?|\.\d+|\s+|.", re.DOTALL)
_FACTORS = frozenset(["frac", "sqrt", "pi"])


@lru_cache(maxsize=512)
def parse_formula(text: str) -> Tree | None:
    """Read a formula into sympy's tree, without computing anything; None if that fails."""
    text = re.sub(rf"(\d+(?:\.\d+)?)\s*{DEGREE}", r"(\\frac{\1\\cdot \\pi}{180})", text)
    if (
        len(text) > _LONGEST
        or _REFUSED.search(text)
        or depth_of(text) > _DEEPEST
        or text.count("|") > _MOST_BARS
    ):
        return None
    text = _without_binomials(text)
    if any(name not in _COMMANDS for name in re.findall(r"\\([a-zA-Z]+)", text)):
        return None
    if re.search(r"\\sqrt\[(?!\d{1,3}\])", text):
        return None
    try:
        tree = latex2sympy(
            _explicit(text),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception:  # the parser raises bare ones
        return None
    return tree if isinstance(tree, sympy.Expr) else None


def depth_of(text: str) -> int:
    """Count how deep brackets are nested."""
    deepest = depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}" and depth > 0)
        deepest = max(deepest, depth)
    return deepest


def _without_binomials(text: str) -> str:
    """Write binomials as factorials, because the parser computes them at once."""
    while (at := text.find("\\binom{")) >= 0:
        middle = closing(text, at + 6)
        end = closing(text, middle) if middle > 0 and text[middle : middle + 1] == "{" else -1
        if end < 0:
            return text
        n, k = text[at + 7 : middle - 1], text[middle + 1 : end - 1]
        text = f"{text[:at]}\\frac{{({n})!}}{{({k})!\\cdot (({n})-({k}))!}}{text[end:]}"
    return text


def _explicit(text: str) -> str:
    """Write decimals as fractions, and the dot of a product after a number.

    The parser reads decimals as floats, `2(3)` as 2 3/1, `2 3` as 5 and `1/2x` as 1/(2x).
    """
    written: list[str] = []
    ends_number = False
    for token in _ATOM.findall(text):
        if token.isspace():
            written.append(token)
            continue
        number = token[0].isdigit() or (token[0] == "." and len(token) > 1)
        starts = number or token[0].isalpha() or token[0] == "(" or token[1:] in _FACTORS
        if ends_number and starts:
            written.append(r"\cdot ")
        written.append(_fraction(token) if number and "." in token else token)
        ends_number = number or token == ")" or (token == "}" and _ends_fraction(written))
    return "".join(written)


def _fraction(decimal: str) -> str:
    whole, _, decimals = decimal.partition(".")
    return rf"\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}}"


def _ends_fraction(written: list[str]) -> bool:
    """Find out whether a closing brace ends the second argument of \\frac."""
    at, arguments = len(written), 0
    while at > 0 and written[at - 1] == "}":
        depth = 0
        while at > 0:
            at -= 1
            depth += (written[at] == "}") - (written[at] == "{")
            if depth == 0:
                break
        arguments += 1
        if arguments == 2:
            return at > 0 and written[at - 1] == r"\frac"
    return False
