"""Draw how much faster each mode makes a step, as bars in an SVG file."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from tlt.simulation.comparison import Outcome

_WIDTH, _LINE, _LABELS, _VALUES = 860, 20, 330, 60
_STYLE = "font: 12px sans-serif; fill: #333"


def draw(outcomes: Sequence[Outcome]) -> str:
    most = max(each.speed_up for each in outcomes)
    lines = list(_lines(outcomes, (_WIDTH - _LABELS - _VALUES) / most))
    height = _LINE * (len(lines) + 1)
    body = "\n".join(
        f'<g transform="translate(0 {_LINE * row})">{line}</g>' for row, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" style="{_STYLE}">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _lines(outcomes: Sequence[Outcome], scale: float) -> Iterator[str]:
    for workers, group in groupby(outcomes, key=lambda each: each.workers):
        title = f"{workers} workers: a step is so many times as fast as without speculation"
        yield f'<text x="10" y="16" font-weight="bold">{title}</text>'
        for each in group:
            length, fill = scale * each.speed_up, "#2a7" if each.mode.speculates else "#9ab"
            yield (
                f'<text x="{_LABELS - 8}" y="14" text-anchor="end">{each.mode.name}</text>'
                f'<rect x="{_LABELS}" y="3" width="{length:.1f}" height="14" fill="{fill}"/>'
                f'<text x="{_LABELS + length + 6:.1f}" y="14">{each.speed_up:.2f}</text>'
            )
