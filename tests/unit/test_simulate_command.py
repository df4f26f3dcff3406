"""`tlt simulate` says which cure pays, from a file of costs or from a run."""

import gzip
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from tests.in_process_cli import run_command
from tlt.simulation.comparison import Outcome, advise
from tlt.simulation.job import Mode

ROOT = Path(__file__).resolve().parents[2]
COSTS = """
lengths: {median: 300, sigma: 1.2}
engine:
  plain: {1: 6e-3, 32: 8e-3}
  cached_token: 2e-8
drafts:
  - seconds: {1: 0.014, 32: 0.03}
    tokens: {1: 5.5}
update: {token: 1e-5, seconds: 0.5}
"""
SPEC = str(ROOT / "configs" / "tiny-reasoner.yaml")


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.yaml"
    path.write_text(COSTS)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the run that the repository keeps."""
    folder = tmp_path_factory.mktemp("run")
    source = ROOT / "docs" / "recorded"
    shutil.copy(source / "spec.json", folder)
    (folder / "journal.jsonl").write_bytes(
        gzip.decompress((source / "journal.jsonl.gz").read_bytes())
    )
    return folder


def test_compares_cures_by_a_file_of_costs(costs: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    arguments = ["--workers", "2,8", "--costs", str(costs), "--steps", "4", "--plot", str(plot)]
    done = run_command("simulate", SPEC, *arguments, "--json")
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    eight = [each for each in found["outcomes"] if each["workers"] == 8]
    assert len(eight) == 8
    synchronous = eight[0]
    assert not any(synchronous["mode"].values())
    assert synchronous["speed_up"] == 1.0
    assert all(
        each["seconds"] * each["speed_up"] == pytest.approx(synchronous["seconds"])
        for each in eight
    )
    assert list(found["advice"]) == ["2", "8"]
    bars = ElementTree.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}rect")
    assert len(list(bars)) == 1 + len(found["outcomes"])


def test_prints_a_line_for_each_mode_and_one_of_advice(costs: Path) -> None:
    done = run_command("simulate", SPEC, "--workers", "8", "--costs", str(costs), "--steps", "2")
    lines = done.stdout.splitlines()
    assert lines[1].split()[:2] == ["synchronous", "1.00x"]
    assert lines[-1].startswith("8 workers: speculation (")


def test_takes_lengths_and_costs_from_a_run(recorded: Path) -> None:
    arguments = ["--workers", "2", "--from-run", str(recorded), "--steps", "2", "--json"]
    done = run_command("simulate", str(recorded / "spec.json"), *arguments)
    assert done.code == 0, done.stderr
    synchronous = json.loads(done.stdout)["outcomes"][0]
    # its steps took 19 to 54 s
    assert 15 < synchronous["seconds"] < 60


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workers", "8"], "it needs the sections lengths, engine and update"),
        (["--workers", "many"], "--workers: 'many' must be numbers with commas"),
        (["--workers", "0"], "--workers: '0' must be numbers with commas"),
    ],
)
def test_explains_wrong_arguments(arguments: list[str], complaint: str) -> None:
    done = run_command("simulate", SPEC, *arguments)
    assert (done.code, complaint in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("lengths: {median: 0, sigma: 1}", "Expected `float` >= 1.0 - at `$.lengths.median`"),
        ("engine: {plain: {}}", "at `$.engine.plain`"),
        ("engine: {plain: {1: -1}}", "Expected `float` > 0.0 - at `$.engine.plain[...]`"),
        ("engines: {plain: {1: 1}}", "unknown field `engines`"),
    ],
)
def test_names_what_is_wrong_in_a_file_of_costs(costs: Path, text: str, complaint: str) -> None:
    costs.write_text(text)
    done = run_command("simulate", SPEC, "--workers", "8", "--costs", str(costs))
    assert (done.code, complaint in done.stderr) == (2, True)


def _outcome(seconds: float, **mode: float) -> Outcome:
    return Outcome(
        mode=msgspec.convert(mode, Mode, strict=False),
        workers=8,
        seconds=seconds,
        device_seconds=8 * seconds,
        speed_up=100.0 / seconds,
        uses={},
        older=0.5 if "partial" in mode or "ahead" in mode else 0.0,
    )


def test_advice_adds_what_gains_most_and_leaves_out_what_gains_too_little() -> None:
    outcomes = [
        _outcome(100.0),
        _outcome(80.0, defer_long=0.5),
        _outcome(60.0, partial=0.5),
        _outcome(80.0, ahead=1),
        _outcome(50.0, speculates=1),
        _outcome(48.0, speculates=1, defer_long=0.5),
        _outcome(40.0, speculates=1, partial=0.5),
        _outcome(45.0, speculates=1, ahead=1),
    ]
    strict = (
        "By the newest weights alone: speculation (2.00x); together 2.00x; "
        "deferred groups: less than 5 % more, which doesn't pay"
    )
    assert advise(outcomes) == (
        "8 workers: speculation (2.00x), then resumed answers (1.25x); together 2.50x; "
        "deferred groups, two batches: less than resumed answers. "
        "With answers of one version: speculation (2.00x), then two batches (1.11x); "
        f"together 2.22x; deferred groups: less than two batches. {strict}"
    )
    faster = [*outcomes[:-1], _outcome(39.0, speculates=1, ahead=1)]
    assert advise(faster) == (
        "8 workers: speculation (2.00x), then two batches (1.28x); together 2.56x; "
        f"deferred groups, resumed answers: less than two batches. {strict}"
    )


def test_advice_adds_nothing_that_gains_less_than_5_percent() -> None:
    outcomes = [_outcome(100.0), _outcome(50.0, speculates=1), _outcome(90.0, defer_long=0.5)]
    outcomes.append(_outcome(48.0, speculates=1, defer_long=0.5))
    assert advise(outcomes) == (
        "8 workers: speculation (2.00x); together 2.00x; "
        "deferred groups: less than 5 % more, which doesn't pay"
    )


def test_advice_says_that_nothing_pays() -> None:
    assert advise([_outcome(100.0), _outcome(96.0, defer_long=0.5)]) == (
        "8 workers: deferred groups: less than 5 % more, which doesn't pay"
    )
