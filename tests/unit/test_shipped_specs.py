"""Every spec in the repository loads, and reads all of its data if that is in the repository."""

from pathlib import Path

import pytest

from tlt.data.dataset import rows
from tlt.spec.prompt_files import prompt_files
from tlt.spec.spec_files import load_job_spec

ROOT = Path(__file__).resolve().parent.parent.parent
_FOLDERS = ("configs", "examples/*", "benchmarks")
_NOT_SPECS = ROOT / "examples" / "cluster"
_FILES = (file for folder in _FOLDERS for file in ROOT.glob(f"{folder}/*.yaml"))
SPECS = sorted(file for file in _FILES if file.parent != _NOT_SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.name)
def test_loads_with_its_data(spec: Path) -> None:
    loaded = load_job_spec(spec)
    if Path(loaded.data.sources[0].path).is_relative_to(ROOT / "examples"):
        is_made_by_example = (spec.parent / "warm_up.py").is_file()
        assert Path(loaded.policy.path).is_dir() or is_made_by_example
        assert loaded.data.evaluation_sets
        for file in prompt_files(loaded.data):
            assert sum(1 for _ in rows(file)) >= 200


def test_finds_the_shipped_specs() -> None:
    assert {"tiny-reasoner.yaml", "qwen2.5-0.5b-gsm8k.yaml", "job.yaml"} <= {s.name for s in SPECS}
