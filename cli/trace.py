"""tlt trace: write a run's spans to a file that Perfetto opens, or send them to a collector."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cli.arguments import JobOrFolder, SessionName
from cli.output import say
from tlt.errors import ConfigError
from tlt.loggers.installed_check import refuse_missing
from tlt.report import Span, TraceSpans
from tlt.report.chrome_trace import chrome_trace
from tlt.runs.run_folder_reader import journal_entries, open_ledger
from tlt.session.client import run_folder


def trace(
    job: JobOrFolder,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; JOB-trace.json by default.")
    ] = None,
    send: Annotated[
        bool,
        typer.Option("--send", help="Send to OTEL_EXPORTER_OTLP_ENDPOINT instead of a file."),
    ] = False,
    session: SessionName = "default",
) -> None:
    """Trace where the time went: the job, its steps and phases, and each worker's duties."""
    folder = run_folder(job, session)
    ended, open_spans = _spans(folder)
    if not ended and not open_spans:
        raise ConfigError(f"{folder.name} has not begun")
    if send:
        _send(folder.name, ended, min(span.begin for span in (*ended, *open_spans)))
        return
    file = out or Path(f"{folder.name}-trace.json")
    try:
        file.write_bytes(msgspec.json.encode(chrome_trace(folder.name, (*ended, *open_spans))))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    say(f"{file}: {len(ended) + len(open_spans)} spans; https://ui.perfetto.dev opens it")


def _spans(folder: Path) -> tuple[list[Span], list[Span]]:
    """Return the spans that ended, and those that are open."""
    ledger, spans = open_ledger(folder), TraceSpans()
    ended: list[Span] = []
    for entry in journal_entries(folder):
        ended += spans.add(ledger.add(entry.event, entry.at))
    return ended, spans.open_spans()


def _send(job: str, ended: list[Span], began: float) -> None:
    """Send the spans that ended: a span that was sent cannot be changed."""
    refuse_missing(("opentelemetry",), "tlt trace")
    from tlt.loggers.otel_spans import SpanSender

    sender = SpanSender(job, began)
    sender.send(ended)
    sender.close()
    say(f"sent {len(ended)} spans of {job}")
