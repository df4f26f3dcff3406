"""Rewrite an answer, in LaTeX, Unicode or plain text, as LaTeX with one form for each thing."""

import re
import unicodedata
from collections.abc import Callable

# written instead of the marks for percent and degrees, and never a command that an answer has
PERCENT = "%"
DEGREE = "°"
# between the rows of a matrix
ROW = "¶"

_UNICODE = {
    "¢": r"\text{ cents}",
    "−": "-", "–": "-", "—": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "≤": r"\leq ", "≥": r"\geq ",
    "⩽": r"\leq ", "⩾": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "≡": r"\equiv ",
    "∞": r"\infty ", "º": DEGREE, "˚": DEGREE, "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ", "√": r"√", "∛": r"\sqrt[3]", "⟨": "(",
    "⟩": ")", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}", "∠": r"\angle ", "…": r"\ldots ", "∧": r"\land ", "∨": r"\lor ",
    "∖": r"\setminus ", "’": "'", "′": "'", "“": '"', "”": '"', "€": "€", "£": "£", "¥": "¥",
    DEGREE: DEGREE,
}  # fmt: skip
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
        re.findall(
            r"\w+",
            """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma
            tau upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega""",
        ),
        strict=True,
    )
)
# with an argument, because `sec` and `min` are units, too
_FUNCTIONS = (
    r"(?:arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|csc|cot|ln|log|exp)(?=\s*[\\({^_a-z\d])"
    r"|sec(?=\s*[\\({^x])|(?:max|min)(?=\s*\()|(?:pi|theta|alpha|beta|gamma|infty)(?![a-zA-Z])"
)

Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _rules(*rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> list[Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in rules]


# how formulas are set, which says nothing of what they are
_LAYOUT = _rules(
    (r"\\(?:text)?color\s*\{[a-zA-Z!\d]*\}", ""),
    (r"\\(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])", ""),
    (r"\^\s*\{?\s*\\text\{\s*(?:st|nd|rd|th)\s*\}\s*\}?|\^\s*\{(?:st|nd|rd|th)\}", ""),
    (r"(?<=\d)(?:st|nd|rd|th)(?![a-zA-Z])", ""),
    (r"\\(?:display|text|script)style(?![a-zA-Z])|\\limits(?![a-zA-Z])|\\hfill|\\!", ""),
    (r"\\[mM]?(?:left|right|big|Big|bigg|Bigg)[lrm]?(?![a-zA-Z])\s*\.?(?=\s*[|\[\](){}\\.]|$)", ""),
    (r"(?<=\d)\s*\{,\}\s*(?=\d{3}(?!\d))", ""),
    (r"(?<=\d),?\s*(?:\\[,;: ]|~)\s*(?=\d{3}(?!\d))", ""),
    (r"(?<![\d.])(\d{1,3}(?: \d{3})+)(?![\d.])", lambda m: m[1].replace(" ", "")),
    (r"\\(?:qquad|quad|enspace|thinspace)(?![a-zA-Z])|\\[,;:>\s]|~|\s+", " "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:tbinom|dbinom)(?![a-zA-Z])", r"\\binom"),
    (r"\\(?:lbrace)(?![a-zA-Z])", r"\\{"),
    (r"\\(?:rbrace)(?![a-zA-Z])", r"\\}"),
    (r"\\lbrack(?![a-zA-Z])", "["),
    (r"\\rbrack(?![a-zA-Z])", "]"),
    (r"\\langle(?![a-zA-Z])", "("),
    (r"\\rangle(?![a-zA-Z])", ")"),
    (r"\\(?:[lr]?vert|mid)(?![a-zA-Z])", "|"),
    (r"\\leq?(?:slant)?(?![a-zA-Z])|<=", r"\\leq "),
    (r"\\geq?(?:slant)?(?![a-zA-Z])|>=", r"\\geq "),
    (r"\\neq?(?![a-zA-Z])|!=", r"\\neq "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\(?:approx|simeq|thickapprox)(?![a-zA-Z])", r"\\approx "),
    (r"\\(?:varnothing|emptyset)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\(?:colon|ratio)(?![a-zA-Z])", ":"),
    (r"\\(?:cdotp|ast|bullet)(?![a-zA-Z])", r"\\cdot "),
    (r"\\(?:dots|cdots|dotsc)(?![a-zA-Z])|\.\.\.", r"\\ldots "),
    (r"\\var(theta|phi|epsilon|rho)(?![a-zA-Z])", r"\\\1"),
    (r"\\(?:Bbb|mathbb)\s*\{?\s*([RZNQC])\s*\}?", r"\\mathbb{\1}"),
    (r"\\R(?![a-zA-Z])", r"\\mathbb{R}"),
    (r"\\(?:begin|end)\{(?:align\*?|aligned|equation\*?|gathered|split)\}|&(?==)", " "),
)
_TEXT = _rules(
    (
        r"\\(?:text(?:bf|it|rm|normal|sf|tt|up|md)?|math(?:rm|bf|it|sf|tt|cal|normal)|mbox|hbox|"
        r"bold(?:symbol)?|bm|emph|operatorname\*?|underline|underbrace)\s*\{",
        r"\\text{",
    ),
    (r"\\text\{,\}", "{,}"),
    (
        r"\\text\{\s*(arc(?:sin|cos|tan)|sinh?|cosh?|tanh?|csc|cot|ln|log|exp)\s*\}(?=\s*[\\({^_a-z\d])",
        r"\\\1 ",
    ),
    (
        r"\\[dt]?frac\s*\{\s*\\text\{([^{}]*)\}\s*\}\s*\{\s*\\text\{([^{}]*)\}\s*(\^\{?\d\}?)?\s*\}",
        r"\\text{\1/\2\3}",
    ),
    (r"\{\s*\\(?:rm|bf|it|sf|tt)(?![a-zA-Z])\s*", r"\\text{"),
    (r"\\(?:rm|bf|it|sf|tt)(?![a-zA-Z])", " "),
)
_WORDS = _rules(
    (r"(?<![a-zA-Z\\])percent(?:age)?(?![a-zA-Z])|(?<=[\d} ])pct(?![a-zA-Z])", PERCENT),
    (r"\\text\{\s*\\?%\s*\}|\\%", PERCENT),
    (r"\\text\{\s*(°|degrees?)\s*\}|(?<![a-zA-Z\\])degrees?(?![a-zA-Z])", DEGREE),
    (r"\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?|\\degree(?![a-zA-Z])", DEGREE),
    (r"(?<=[\d} ])deg(?![a-zA-Z])", DEGREE),
    (r"\\text\{\s*,?\s*and\s*,?\s*\}|(?<![a-zA-Z\\]),?\s*and(?![a-zA-Z])|\\wedge", r"\\land "),
    (r"\\text\{\s*,?\s*or\s*,?\s*\}|(?<![a-zA-Z\\]),?\s*or(?![a-zA-Z])|\\vee", r"\\lor "),
    (
        r"(?<![a-zA-Z\\])(?:positive |plus )?infinity(?![a-zA-Z])|(?<![a-zA-Z\\])oo(?![a-zA-Z])",
        r"\\infty ",
    ),
    (r"\\text\{\s*\}", ""),
    (
        rf"\\text\{{[^{{}}]*\}}|(?<![a-zA-Z\\])({_FUNCTIONS})",
        lambda match: f"\\{match[1]} " if match[1] else match[0],
    ),
)
_LARGE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NUMBERS = _rules(
    (
        rf"(?<=\d)\s*(?:\\text\{{\s*({'|'.join(_LARGE)})(?![a-zA-Z])|({'|'.join(_LARGE)})(?![a-zA-Z]))",
        lambda m: rf"\cdot 10^{{{_LARGE[m[1] or m[2]]}}}" + (r"\text{" if m[1] else ""),
    ),
    (r"\\text\{\s*\}", ""),
    (r"\*\*", "^"),
    (r"(?<=[\d}])\s*(?:\\text\{\s*to\s*\}|to(?![a-zA-Z]))\s*(?=\d)", ":"),
    (r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d+)(?![\w.])", r"\1\\cdot 10^{\2}"),
    (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
    (r"\^\s*([+-]?\d+(?:\.\d+)?)", r"^{\1}"),
    (r"_\s*(\d+|[a-zA-Z])", r"_{\1}"),
    (r"\^\s*([+-]?(?:[a-zA-Z]|\\(?:pi|theta|infty)(?![a-zA-Z])))", r"^{\1}"),
    (r"\^\s*(\\frac\{[^{}]*\}\{[^{}]*\})", r"^{\1}"),
    (
        r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?",
        lambda m: _recurring(*m.groups()),
    ),
    (
        r"(?<![\d.])(\d{1,9})\.(\d{0,9}?)(\d{1,6}?)\3{2,9}\s*\\ldots",
        lambda m: _recurring(*m.groups()),
    ),
    (r"(?<![\d.}])(\d+)\s*\+?(?<!\+)\\frac\{(\d+)\}\{(\d+)\}", lambda m: _mixed(m)),
    (r"(?<![\d./^])(\d+) +(\d+)/(\d+)(?![\d./])", lambda m: _mixed(m)),
)
_CIS = re.compile(r"\\text\{\s*cis\s*\}|\\cis(?![a-zA-Z])|(?<![a-zA-Z\\])cis(?=[\s({\\\d])")
_ENDS = re.compile(r"^[\s=]+|(?:[\s.,;:¶])+$")
_APPROXIMATELY = re.compile(
    r"^\s*(?:\\approx|(?:approximately|about|roughly|around)(?=\s)"
    r"|\\text\{(?:approximately|about|roughly|around)\})",
    re.I,
)


def normalize(text: str) -> str:
    """Rewrite an answer, so that what means the same in another notation looks the same."""
    text = _ascii(_without_delimiters(text.strip()))
    text = _apply(_TEXT, text)
    text = _apply(_LAYOUT, text)
    text = _open_text(_apply(_WORDS, _split_text(text)))
    text = re.sub(r"(?<![\\a-zA-Z])(?:sqrt|√)\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\a-zA-Z])(?:sqrt(?![a-zA-Z])|√)", r"\\sqrt ", text)
    text = _brace(text, "frac", 2)
    text = _brace(text, "binom", 2)
    text = _brace(text, "sqrt", 1)
    text = _brace_powers(text)
    text = _open_cis(text)
    text = _apply(_NUMBERS, text)
    text = re.sub(r"\s+", " ", text)
    while (shorter := _ENDS.sub("", _APPROXIMATELY.sub("", text))) != text:
        text = shorter
    return text


def _apply(rules: list[Rule], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _without_delimiters(text: str) -> str:
    """Drop what delimits formulas, and leave one `$` where it is money."""
    if "\\begin{" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z(){}%$,;!])", r"\\", text)  # escaped twice
    text = re.sub(r"\\\\(?:\s*\[\d+\s*[a-z]{2}\])?|\\cr(?![a-zA-Z])", ROW, text)
    text = re.sub(r"\\[()\[\]]|\\$", " ", text)
    text = text.replace(r"\$", "\0").replace("$$", " ")
    text = text.replace("$", "\0") if text.count("$") % 2 else text.replace("$", " ")
    return text.replace("\0", "$").replace("`", "")


def _ascii(text: str) -> str:
    if text.isascii():
        return text
    text = re.sub(r"√\s*(\d+(?:\.\d+)?|[a-zA-Z])", r"\\sqrt{\1}", text)
    written: list[str] = []
    level = ""
    for char in text:
        kind, plain = _plain(char)
        if kind != level:
            written.append("}" if level else "")
            written.append({"<super>": "^{", "<sub>": "_{"}.get(kind, ""))
            level = kind
        written.append(plain)
    return "".join(written) + ("}" if level else "")


def _plain(char: str) -> tuple[str, str]:
    """Return whether a character is raised or lowered, and what it stands for."""
    if char in _UNICODE:
        return "", _UNICODE[char]
    if char in _GREEK:
        return "", f"\\{_GREEK[char]} "
    normal = unicodedata.normalize("NFKC", char)
    kind = unicodedata.decomposition(char).partition(" ")[0]
    if kind == "<fraction>":
        above, _, below = normal.partition("⁄")
        return "", rf"\frac{{{above}}}{{{below}}}"
    return kind if kind in ("<super>", "<sub>") else "", normal.replace("−", "-")


def _split_text(text: str) -> str:
    """Take the commas, `and` and `or` between words out of \\text."""

    def split(match: re.Match[str]) -> str:
        return re.sub(
            r"\s*(?:(?<!\d),|,(?!\d))\s*(?:(and|or)\s+)?|\s+(and|or)\s+",
            lambda m: rf"}} \text{{ {m[1] or m[2]} }} \text{{" if m[1] or m[2] else r"}, \text{",
            match[0],
        )

    return re.sub(r"\\text\{[^{}]*\}", split, text)


def _open_text(text: str) -> str:
    """Replace \\text around a number, a formula or one letter by what is in it."""
    begin, at = "\\text{", 0
    while (at := text.find(begin, at)) >= 0:
        end = closing(text, at + len(begin) - 1)
        if end < 0:
            break
        inner = text[at + len(begin) : end - 1]
        bare = sum(char.isalpha() for char in inner) <= 1 or re.search(r"[\\{}]", inner)
        if bare or re.match(r"\s*[-$€£(]*\.?\d", inner):
            text = f"{text[:at]} {inner} {text[end:]}"
        else:
            text = f"{text[:at]}{begin}{inner.strip()}}}{text[end:]}"
            at += len(begin)
    return text


def closing(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at `start`, or -1."""
    pairs = {"{": "}", "(": ")", "[": "]"}
    opening, close = text[start], pairs[text[start]]
    depth, index = 0, start
    while index < len(text):
        if text[index] == "\\" and opening == "{":
            index += 2
            continue
        depth += (text[index] == opening) - (text[index] == close)
        index += 1
        if depth == 0:
            return index
    return -1


def _brace(text: str, command: str, count: int) -> str:
    """Put braces round the arguments of a command: \\frac12 is \\frac{1}{2}."""
    parts = re.split(rf"\\{command}(?![a-zA-Z])", text)
    done = parts.pop()
    for before in reversed(parts):
        option, rest = "", done.lstrip()
        if command == "sqrt" and rest.startswith("[") and (end := closing(rest, 0)) > 0:
            option, rest = rest[:end], rest[end:]
        arguments: list[str] = []
        for _ in range(count):
            argument, rest = _argument(rest.lstrip(), in_parentheses=command == "sqrt")
            arguments.append(f"{{{argument}}}")
        done = f"{before}\\{command}{option}{''.join(arguments)}{rest}"
    return done


def _argument(rest: str, *, in_parentheses: bool) -> tuple[str, str]:
    if rest[:1] == "{" and (end := closing(rest, 0)) > 0:
        return rest[1 : end - 1].strip(), rest[end:]
    if in_parentheses and rest[:1] == "(" and (end := closing(rest, 0)) > 0:
        return rest[1 : end - 1].strip(), rest[end:]
    command = re.match(r"\\[a-zA-Z]+(\{[^{}]*\})*", rest)
    size = command.end() if command else 1
    return rest[:size], rest[size:]


def _brace_powers(text: str) -> str:
    """Put braces round an exponent in parentheses."""
    at = 0
    while (at := text.find("^", at)) >= 0:
        start = at + 1 + (text[at + 1 : at + 2] == " ")
        if text[start : start + 1] == "(" and (end := closing(text, start)) > 0:
            text = f"{text[:at]}^{{{text[start + 1 : end - 1]}}}{text[end:]}"
        at += 1
    return text


def _open_cis(text: str) -> str:
    """Write r cis x, which is r (cos x + i sin x), as a power of e."""
    while found := _CIS.search(text):
        rest = text[found.end() :].lstrip()
        end = closing(rest, 0) if rest[:1] in ("(", "{") else -1
        # without brackets the angle ends where the number does
        end = end if end > 0 else len(re.split(r"[,;=]|\\land|\\lor", rest)[0])
        angle = rest[:end].replace(DEGREE, r"\cdot\frac{\pi}{180}")
        text = f"{text[: found.start()]} e^{{i({angle})}}{rest[end:]}"
    return text


def _recurring(whole: str, fixed: str, period: str) -> str:
    """Write 0.1(6) as a fraction."""
    below = (10 ** len(period) - 1) * 10 ** len(fixed)
    above = int((whole or "0") + fixed + period) - int((whole or "0") + fixed)
    return rf"\frac{{{above}}}{{{below}}}"


def _mixed(match: re.Match[str]) -> str:
    """Write 1 1/2 as 3/2, unless the fraction isn't a proper one."""
    whole, above, below = (int(group) for group in match.groups())
    if above >= below:
        return rf"{whole}\cdot \frac{{{above}}}{{{below}}}"
    return rf"\frac{{{whole * below + above}}}{{{below}}}"
