"""The tap makes no device wait, and what was computed twice keeps its first origins."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.labelled_device import labelled_device
from tlt.engine.sglang.scheduler.tap_writer import Pass, StepKind, TapWriter
from tlt.engine.sglang.shared.shared_hidden_state_buffer import RequestName, Tap, TapShape

NAME = RequestName(slot=1, salt="a", serial=5)
PROMPT = (3, 4, 5)


@dataclass
class Request:
    rid: str = NAME.write()
    origin_input_ids: tuple[int, ...] = PROMPT


@pytest.fixture
def tap(tmp_path: Path) -> Tap:
    shape = TapShape(slots=2, positions=16, layers=1, hidden=4, dtype="float32")
    return Tap.create(tmp_path / "tap", shape)


def computed(
    start: int, count: int, version: int, device: str = "cpu", text: int | None = None
) -> Pass:
    """Make a pass that feeds `count` tokens and gains one; `text` is what a prefill knows."""
    return Pass(
        requests=[Request()],
        starts=torch.tensor([start], device=device),
        counts=[count],
        stride=None,
        states=torch.full((count, 1, 4), float(version), device=device),
        tokens=torch.tensor([50 + version], device=device),
        version=version,
        kind=StepKind(),
        texts=None if text is None else [text],
    )


def test_a_retracted_request_keeps_the_versions_of_its_tokens(tap: Tap) -> None:
    """SGLang frees its cache and later prefills it again, by then perhaps with new weights."""
    writer = TapWriter(tap)
    writer.stage(computed(0, 3, version=1, text=3))
    for position in (3, 4):
        writer.stage(computed(position, 1, version=1))
    writer.stage(computed(0, 6, version=2, text=6))
    assert tap.filled[1] == 6
    assert tap.versions[1, :6].tolist() == [1] * 5 + [2]
    assert tap.tokens[1, 2:6].tolist() == [51, 51, 51, 52]
    assert tap.states[1, :6, 0, 0].tolist() == [1.0] * 5 + [2.0]


@pytest.mark.parametrize("chunks", [[(0, 5)], [(0, 2), (2, 3)]])
def test_a_retracted_request_forgets_the_results_that_were_dropped(
    tap: Tap, chunks: list[tuple[int, int]]
) -> None:
    """The scheduler drops a result that arrives after it has retracted the request."""
    writer = TapWriter(tap)
    writer.stage(computed(0, 3, version=1, text=3))
    for position in (3, 4, 5):
        writer.stage(computed(position, 1, version=1))
    # the results of the last two passes were dropped
    for start, count in chunks:
        writer.stage(computed(start, count, version=2, text=5))
    assert tap.filled[1] == 5
    assert tap.versions[1, :5].tolist() == [1, 1, 1, 1, 2]
    assert tap.tokens[1, 2:5].tolist() == [51, 51, 52]
    assert tap.states[1, :5, 0, 0].tolist() == [1.0, 1.0, 1.0, 1.0, 2.0]


def test_a_pass_on_a_device_is_staged_without_waiting(tap: Tap) -> None:
    with labelled_device() as device:
        writer = TapWriter(tap)
        passes = [computed(0, 3, 1, "cuda:0"), computed(3, 1, 2, "cuda:0")]
        device.syncs.clear()
        for each in passes:
            writer.stage(each)
        assert tap.filled[1] == 0
        writer.publish_oldest()
        writer.publish_staged()
        assert device.syncs == []
    assert tap.filled[1] == 4
    assert tap.versions[1, :4].tolist() == [1, 1, 1, 2]
    assert tap.states[1, :4, 0, 0].tolist() == [1.0, 1.0, 1.0, 2.0]
