"""Format spans as Perfetto and Chrome's tracing read them, with one track for each worker."""

from collections.abc import Iterator, Sequence
from typing import Any

from tlt.report.trace_spans import MERGING, Span

_JOB_TRACK, _DRAFTER_TRACK = "job", "drafter"
_Event = dict[str, Any]


def chrome_trace(job: str, spans: Sequence[Span]) -> dict[str, list[_Event]]:
    began = min((span.begin for span in spans), default=0.0)
    # w2 before w10
    names = sorted(map(_track, spans), key=lambda name: (len(name), name))
    tracks = {
        name: {"pid": 1, "tid": number}
        for number, name in enumerate(dict.fromkeys([_JOB_TRACK, _DRAFTER_TRACK, *names]))
    }
    events: list[_Event] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": job}}]
    for name, track in tracks.items():
        index = {"sort_index": track["tid"]}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": name}, **track})
        events.append({"ph": "M", "name": "thread_sort_index", "args": index, **track})
    # enclosing spans come before those that they enclose
    for span in sorted(spans, key=lambda each: (each.begin, -each.end, each.number)):
        events += _events(span, tracks[_track(span)], began)
    return {"traceEvents": events}


def _track(span: Span) -> str:
    if span.name == MERGING:
        return _DRAFTER_TRACK
    return _JOB_TRACK if span.worker is None else str(span.worker)


def _events(span: Span, track: _Event, began: float) -> Iterator[_Event]:
    def microseconds(at: float) -> int:
        return round(1e6 * (at - began))

    yield {
        "ph": "X",
        "name": f"step {span.attributes['step']}" if "step" in span.attributes else span.name,
        "cat": span.name,
        "ts": microseconds(span.begin),
        "dur": microseconds(span.end) - microseconds(span.begin),
        "args": span.attributes | ({"error": span.error} if span.error is not None else {}),
        **track,
    }
    for moment in span.moments:
        yield {"ph": "i", "s": "t", "name": moment.name, "ts": microseconds(moment.at), **track}
