"""Compiled layers learn the same, and a failing compiler costs only a log line."""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch._dynamo.utils import counters

from tests.trainer.models import CPU, learner, needs_compiler, never_interrupt, samples, spec, whole
from tlt.trainer.policy.model.micro_batches import build_micro_batches
from tlt.trainer.policy.model.model_loading import load_model
from tlt.trainer.policy.policy_learner import PolicyLearner
from tlt.trainer.policy.speed.compile_layers import compile_layers, is_compiling_worthwhile
from tlt.trainer.policy.speed.layer_probe import LayerProbe, decoder_layers


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()
    torch.compiler.set_stance("default")


ANNOUNCED = "compiling the layers, and the update waits"


def compile_by(backend: Any, patch: pytest.MonkeyPatch) -> None:
    honest = torch.nn.Module.compile

    def compile_with_it(layer: torch.nn.Module, **options: bool) -> None:
        honest(layer, backend=backend, **options)

    patch.setattr(torch.nn.Module, "compile", compile_with_it)


@needs_compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "backend",
    [
        # captures the same graphs, and generates no C++, which takes a minute
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.live),
    ],
)
def test_compiled_layers_give_the_same_update(
    fresh_dir: str, monkeypatch: pytest.MonkeyPatch, backend: str
):
    compile_by(backend, monkeypatch)
    parts = [whole(samples(11))]
    plain = learner(fresh_dir, compile=False)
    before = {name: tensor.clone() for name, tensor in plain.weights().items()}
    expected = plain.update(0, parts, None, never_interrupt)
    graphs: list[int] = []

    @contextmanager
    def busy() -> Iterator[None]:
        yield
        graphs.append(counters["stats"]["unique_graphs"])

    learns = PolicyLearner(fresh_dir, spec(compile=True, attention="native"), None, CPU, busy)
    with capture_logs() as logs, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = learns.update(0, parts, None, never_interrupt)
    assert [entry["event"] for entry in logs] == [ANNOUNCED, "layers compiled"]
    assert metrics.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    # compare norms, because Adam moves a weight with a tiny gradient as far as any other
    for name, tensor in plain.weights().items():
        moved = (tensor - before[name]).norm()
        assert (learns.weights()[name] - tensor).norm() <= 1e-2 * moved
    learns.update(1, [whole(samples(7, seed=1))], None, never_interrupt)
    # every graph was compiled before the first update
    assert graphs == [counters["stats"]["unique_graphs"]]
    assert graphs[0] > 0


def test_failing_compiler_costs_a_log_line(fresh_dir: str, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such compiler\nat all")

    compile_by(broken, monkeypatch)
    learns = learner(fresh_dir, compile=True)
    with capture_logs() as logs:
        learns.update(0, [whole(samples(4))], None, never_interrupt)
        learns.update(1, [whole(samples(4))], None, never_interrupt)
    events = [entry for entry in logs if entry["event"] == "layers stay as they are"]
    assert len(events) == 1
    assert "no such compiler" in events[0]["reason"]


def test_failing_probe_costs_a_log_line(fresh_dir: str, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> float:
        raise RuntimeError("out of memory")

    learns = learner(fresh_dir, compile=True, attention="padded")
    monkeypatch.setattr(LayerProbe, "seconds", broken)
    with capture_logs() as logs:
        learns.update(0, [whole(samples(4))], None, never_interrupt)
    announced, entry = logs
    assert announced["event"] == ANNOUNCED
    assert entry["reason"] == "out of memory"


def test_reports_busy_while_compiling(fresh_dir: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []

    @contextmanager
    def busy() -> Iterator[None]:
        seen.append("busy")
        yield
        seen.append("over")

    monkeypatch.setattr(
        "tlt.trainer.policy.policy_learner.compile_layers", lambda *_: seen.append("compiling")
    )
    learns = PolicyLearner(fresh_dir, spec(compile=True), None, CPU, busy)
    learns.update(0, [whole(samples(3))], None, lambda: seen.append("between"))
    assert seen == ["busy", "compiling", "over", "between"]


def test_undoes_compilation_that_is_not_faster(fresh_dir: str, monkeypatch: pytest.MonkeyPatch):
    compile_by("eager", monkeypatch)
    durations = [1.0, 2.0]
    monkeypatch.setattr(LayerProbe, "seconds", lambda *_: durations.pop(0))
    model = load_model(fresh_dir, CPU)
    (batch,) = build_micro_batches(samples(4), 1000, CPU, packed=False)
    assert not compile_layers(model, batch, bfloat16=False, forced=False)
    assert all(layer._compiled_call_impl is None for layer in decoder_layers(model))
    durations += [1.0, 2.0]
    assert compile_layers(model, batch, bfloat16=False, forced=True)


def test_a_shape_that_needs_another_graph_runs_uncompiled(
    fresh_dir: str, monkeypatch: pytest.MonkeyPatch
):
    compile_by("eager", monkeypatch)
    learns = learner(fresh_dir, compile=True, attention="padded")
    several, alone = samples(8), samples(1, seed=1)
    learns.update(0, [whole(several)], None, never_interrupt)
    graphs = counters["stats"]["unique_graphs"]
    found = learns.update(1, [whole(alone)], None, never_interrupt)
    assert counters["stats"]["unique_graphs"] == graphs > 0
    plain = learner(fresh_dir, compile=False, attention="padded")
    plain.update(0, [whole(several)], None, never_interrupt)
    expected = plain.update(1, [whole(alone)], None, never_interrupt)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-3)


def test_does_not_compile_in_a_short_job(fresh_dir: str, monkeypatch: pytest.MonkeyPatch):
    def never(*_: object) -> bool:
        raise AssertionError("compiled")

    monkeypatch.setattr("tlt.trainer.policy.policy_learner.compile_layers", never)
    for wanted in ("auto", False):
        learns = learner(fresh_dir, compile=wanted)
        for step in range(2):
            learns.update(step, [whole(samples(3))], None, never_interrupt)


def test_compiles_only_if_it_pays_within_the_job():
    assert not is_compiling_worthwhile(spec(steps=1000), 0, last_update_seconds=0.0)
    assert not is_compiling_worthwhile(spec(steps=8), 1, last_update_seconds=10.0)
    assert is_compiling_worthwhile(spec(steps=1000), 1, last_update_seconds=10.0)
    assert not is_compiling_worthwhile(spec(steps=1000), 990, last_update_seconds=10.0)
