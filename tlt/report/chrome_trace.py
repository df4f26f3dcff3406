"""Spans in the format that Perfetto and Chrome's tracing open: a line for each worker."""

from collections.abc import Iterator, Sequence
from typing import Any

from tlt.report.trace_spans import MERGING, Span

_JOB_LINE, _DRAFTER_LINE = "job", "drafter"
_Event = dict[str, Any]


def chrome_trace(job: str, spans: Sequence[Span]) -> dict[str, list[_Event]]:
    began = min((span.begin for span in spans), default=0.0)
    lines = list(dict.fromkeys([_JOB_LINE, _DRAFTER_LINE, *sorted(map(_line, spans), key=_order)]))
    events: list[_Event] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": job}}]
    for number, line in enumerate(lines):
        of_line = {"pid": 1, "tid": number}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": line}, **of_line})
        events.append(
            {"ph": "M", "name": "thread_sort_index", "args": {"sort_index": number}, **of_line}
        )
    numbers = {line: number for number, line in enumerate(lines)}
    # who encloses others comes first
    for span in sorted(spans, key=lambda each: (each.begin, -each.end, each.number)):
        events += _events(span, {"pid": 1, "tid": numbers[_line(span)]}, began)
    return {"traceEvents": events}


def _line(span: Span) -> str:
    if span.name == MERGING:
        return _DRAFTER_LINE
    return _JOB_LINE if span.worker is None else str(span.worker)


def _order(line: str) -> tuple[int, str]:
    """w2 before w10."""
    return len(line), line


def _events(span: Span, line: _Event, began: float) -> Iterator[_Event]:
    def microseconds(at: float) -> int:
        return round(1e6 * (at - began))

    told = dict(span.attributes) | ({"error": span.error} if span.error is not None else {})
    yield {
        "ph": "X",
        "name": f"step {span.attributes['step']}" if "step" in span.attributes else span.name,
        "cat": span.name,
        "ts": microseconds(span.begin),
        "dur": microseconds(span.end) - microseconds(span.begin),
        "args": told,
        **line,
    }
    for moment in span.moments:
        at = microseconds(moment.at)
        yield {"ph": "i", "s": "t", "name": moment.name, "ts": at, **line}
