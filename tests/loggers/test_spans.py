"""Spans of a run nest in time, add up to the ledger's seconds, and are sent with stable ids."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from random import Random
from threading import Thread

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent
from typer.testing import CliRunner

from cli.main import app
from tests.dashboard.runs import some_run, write_run
from tests.loggers.test_following import name_loggers, start
from tests.loggers.test_reports import JOB, reported
from tlt.base.id_types import JobId
from tlt.loggers.backends import LoggedRun, open_logger
from tlt.report import Ledger, Span, TraceSpans
from tlt.runs.run_folder_reader import read_snapshot
from tlt.spec.config import JobSpec
from tlt.store.journal import JournalEntry


def spans_of(spec: JobSpec, entries: Sequence[JournalEntry]) -> list[Span]:
    ledger, spans = Ledger(JOB, spec), TraceSpans()
    found: list[Span] = []
    for entry in entries:
        found += spans.add(ledger.add(entry.event, entry.at))
    assert not spans.open_spans()
    return found


def assert_nested(spans: Sequence[Span]) -> None:
    by_number = {span.number: span for span in spans}
    assert len(by_number) == len(spans)
    for span in spans:
        assert span.begin <= span.end
        assert all(span.begin <= moment.at <= span.end for moment in span.moments)
        if span.parent is None:
            assert span.name == "job"
            continue
        parent = by_number[span.parent]
        assert parent.number < span.number
        assert parent.begin <= span.begin
        assert span.end <= parent.end


def test_spans_of_a_recorded_run_are_a_tree(
    recorded: Path, spec: JobSpec, entries: list[JournalEntry]
) -> None:
    spans = spans_of(spec, entries)
    assert_nested(spans)
    snapshot = read_snapshot(recorded)
    spent: defaultdict[str, float] = defaultdict(float)
    on_duty: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        sums = spent if span.worker is None else on_duty
        sums[span.name] += span.end - span.begin
    for phase, seconds in snapshot.phases.items():
        assert spent[phase] == pytest.approx(seconds)
    for duty in ("rollout", "drafter_training", "policy_update"):
        of_all = sum(worker.get(duty, 0.0) for worker in snapshot.workers.values())
        assert on_duty[duty] == pytest.approx(of_all)
    assert spent["step"] == pytest.approx(spent["job"]) == pytest.approx(snapshot.seconds)
    assert spent["merging"] > 0
    adopted = [m.name for span in spans for m in span.moments if "in use" in m.name]
    assert adopted


@pytest.mark.parametrize("seed", range(8))
def test_spans_nest_whatever_is_lost(seed: int) -> None:
    world = some_run(Random(seed).randrange(1000), 120)
    ledger, spans = Ledger(JobId("job"), world.spec), TraceSpans()
    found: list[Span] = []
    for line in world.journal:
        entry = msgspec.json.decode(line, type=JournalEntry)
        found += spans.add(ledger.add(entry.event, entry.at))
    assert_nested([*found, *spans.open_spans()])


def test_writes_a_file_that_perfetto_opens(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["trace", str(recorded), "--out", str(out)])
    assert done.exit_code == 0, done.output
    events = json.loads(out.read_bytes())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["job", "drafter", "w0", "w1"]
    until: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        ends = until[event["tid"]]
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        # the events of a track must nest
        assert not ends or event["ts"] + event["dur"] <= ends[-1]
        ends.append(event["ts"] + event["dur"])


class Collector(HTTPServer):
    def __init__(self) -> None:
        self.spans: list[Sent] = []
        self.services: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Request)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Request(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {a.key: a.value.string_value for a in each.resource.attributes}
            self.server.services.add(names["service.name"])
            for scope in each.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.address)
        yield server
        server.shutdown()
        serving.join()


def test_sends_the_tree_to_a_collector_step_by_step(
    recorded: Path, spec: JobSpec, entries: list[JournalEntry], collector: Collector
) -> None:
    logger = open_logger("opentelemetry", LoggedRun(JOB, recorded, spec, ""))
    for report in reported(spec, entries):
        logger.write(report)
    logger.close()
    spans = spans_of(spec, entries)
    assert len(collector.spans) == len(spans)
    assert collector.services == {"tlt"}
    by_id = {span.span_id: span for span in collector.spans}
    assert len({span.trace_id for span in collector.spans}) == 1
    [job] = [span for span in collector.spans if not span.parent_span_id]
    assert job.name == "job"
    assert job.start_time_unix_nano == pytest.approx(1e9 * entries[0].at, abs=1000)
    for span in collector.spans:
        assert span is job or span.parent_span_id in by_id
    steps = [span for span in collector.spans if span.name == "step"]
    rewards = [a.value.double_value for s in steps for a in s.attributes if "train.rew" in a.key]
    assert rewards == [step.reward for step in read_snapshot(recorded).steps]

    sent = set(by_id)
    collector.spans.clear()
    done = CliRunner().invoke(app, ["trace", str(recorded), "--send"])
    assert done.exit_code == 0, done.output
    assert {span.span_id for span in collector.spans} == sent


def test_logger_process_sends_all_spans(
    recorded: Path, spec: JobSpec, entries: list[JournalEntry], collector: Collector
) -> None:
    name_loggers(recorded, spec, "opentelemetry")
    assert start(recorded).wait(30) == 0
    assert len(collector.spans) == len(spans_of(spec, entries))


def test_sends_the_ended_spans_of_a_running_job(tmp_path: Path, collector: Collector) -> None:
    world = some_run(3)
    folder = write_run(world, tmp_path, len(world.journal) // 2)
    assert CliRunner().invoke(app, ["trace", str(folder), "--send"]).exit_code == 0
    assert collector.spans
    assert all(span.parent_span_id for span in collector.spans)
