"""Send a run's spans to an OpenTelemetry collector at OTEL_EXPORTER_OTLP_ENDPOINT.

A span's id is derived from its run and its number. So a span that is sent twice stays one span, and
a child may be sent before its parent.
"""

import os
from collections.abc import Sequence
from hashlib import blake2b

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator

from tlt.errors import TltError
from tlt.report import Span

# spans in one request
_BATCH = 512


class SpansNotSent(TltError):
    """The collector refused the spans."""


class _RunIds(IdGenerator):
    """Derive ids from the run; `span` is the id that the next span gets."""

    def __init__(self, run: str) -> None:
        self.trace = int.from_bytes(blake2b(run.encode(), digest_size=16).digest())
        self.span = 0
        self._run = run

    def span_id(self, number: int) -> int:
        name = f"{self._run} {number}".encode()
        return int.from_bytes(blake2b(name, digest_size=8).digest())

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span


class _EndedSpans(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanSender:
    def __init__(self, job: str, began: float) -> None:
        self._ids = _RunIds(f"{job} {began!r}")
        self._ended = _EndedSpans()
        resource = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "tlt"}
        provider = TracerProvider(resource=Resource.create(resource), id_generator=self._ids)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("tlt")
        self._exporter = OTLPSpanExporter()

    def send(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._record(span)
        ended, self._ended.spans = self._ended.spans, []
        for first in range(0, len(ended), _BATCH):
            result = self._exporter.export(ended[first : first + _BATCH])
            if result is not SpanExportResult.SUCCESS:
                raise SpansNotSent("the OpenTelemetry collector refused the spans")

    def close(self) -> None:
        self._exporter.shutdown()

    def _record(self, span: Span) -> None:
        self._ids.span = self._ids.span_id(span.number)
        recorded = self._tracer.start_span(
            span.name,
            context=self._parent_context(span.parent),
            start_time=_nanoseconds(span.begin),
            attributes={
                f"tlt.{name.replace('/', '.')}": value for name, value in span.attributes.items()
            },
        )
        for moment in span.moments:
            recorded.add_event(moment.name, timestamp=_nanoseconds(moment.at))
        if span.error is not None:
            recorded.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        recorded.end(_nanoseconds(span.end))

    def _parent_context(self, number: int | None) -> Context:
        if number is None:
            return Context()
        parent = trace.SpanContext(
            trace_id=self._ids.trace,
            span_id=self._ids.span_id(number),
            is_remote=False,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def _nanoseconds(at: float) -> int:
    return round(1e9 * at)
