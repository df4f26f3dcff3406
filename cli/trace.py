"""tlt trace: a run's spans in a file that Perfetto opens, or sent to a collector."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cli.arguments import JobOrFolder, SessionName
from cli.output import say
from cli.session_client import run_folder
from tlt.errors import ConfigError
from tlt.loggers.installed_check import refuse_missing
from tlt.report import Span, Spans
from tlt.report.chrome_trace import chrome_trace
from tlt.run_folder import journal_entries, open_ledger


def trace(
    job: JobOrFolder,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; JOB-trace.json if not given.")
    ] = None,
    send: Annotated[
        bool, typer.Option("--send", help="To OTEL_EXPORTER_OTLP_ENDPOINT, and no file.")
    ] = False,
    session: SessionName = "default",
) -> None:
    """Where the time went, span by span: job, steps, phases, and what each worker did."""
    folder = run_folder(job, session)
    over, going = _spans(folder)
    if not over and not going:
        raise ConfigError(f"{folder.name} has not begun")
    if send:
        _send(folder.name, over, (*over, *going))
        return
    file = out or Path(f"{folder.name}-trace.json")
    try:
        file.write_bytes(msgspec.json.encode(chrome_trace(folder.name, (*over, *going))))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    say(f"{file}: {len(over) + len(going)} spans; https://ui.perfetto.dev opens it")


def _spans(folder: Path) -> tuple[list[Span], list[Span]]:
    """Those that are over, and those that go on."""
    ledger, spans = open_ledger(folder), Spans()
    over: list[Span] = []
    for entry in journal_entries(folder):
        before = ledger.state
        commands = ledger.add(entry.event, entry.at)
        over += spans.watch(before, entry.event, ledger.state, commands, entry.at)
    return over, spans.open()


def _send(job: str, over: list[Span], known: tuple[Span, ...]) -> None:
    """What goes on is sent once it is over: a span that was sent is never changed."""
    refuse_missing(("opentelemetry",), "tlt trace")
    from tlt.loggers.otel_spans import Tracing

    tracing = Tracing(job, min(span.begin for span in known))
    tracing.send(over)
    tracing.close()
    say(f"sent {len(over)} spans of {job}")
