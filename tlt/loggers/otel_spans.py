"""A run's spans to a collector of OpenTelemetry, where OTEL_EXPORTER_OTLP_ENDPOINT says.

A span has the same id whenever it is sent: which run, and which of its spans. So what was sent
twice is one span, and a child may come before its parent.
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

# spans of one request
_BATCH = 512


class NotSent(TltError):
    """The collector did not take it."""


class _Named(IdGenerator):
    """Gives the ids that it was told."""

    def __init__(self, run: str) -> None:
        self.trace = int.from_bytes(blake2b(run.encode(), digest_size=16).digest())
        self.span = 0
        self._run = run

    def of(self, number: int) -> int:
        name = f"{self._run} {number}".encode()
        return int.from_bytes(blake2b(name, digest_size=8).digest())

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span


class _Ended(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class Tracing:
    def __init__(self, job: str, began: float) -> None:
        self._ids = _Named(f"{job} {began!r}")
        self._ended = _Ended()
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "tlt"}
        provider = TracerProvider(resource=Resource.create(named), id_generator=self._ids)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("tlt")
        self._exporter = OTLPSpanExporter()

    def send(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._record(span)
        ended, self._ended.spans = self._ended.spans, []
        for first in range(0, len(ended), _BATCH):
            sent = self._exporter.export(ended[first : first + _BATCH])
            if sent is not SpanExportResult.SUCCESS:
                raise NotSent("the collector of OpenTelemetry does not take the spans")

    def close(self) -> None:
        self._exporter.shutdown()

    def _record(self, span: Span) -> None:
        self._ids.span = self._ids.of(span.number)
        recorded = self._tracer.start_span(
            span.name,
            context=self._parent(span.parent),
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

    def _parent(self, number: int | None) -> Context:
        if number is None:
            return Context()
        parent = trace.SpanContext(
            trace_id=self._ids.trace,
            span_id=self._ids.of(number),
            is_remote=False,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def _nanoseconds(at: float) -> int:
    return round(1e9 * at)
