"""Load a job's spec and check that the files that it names exist."""

from pathlib import Path

from tlt.loggers.installed_check import refuse_missing
from tlt.spec.config import JobSpec
from tlt.spec.spec_files import load_job_spec, require_files


def load_runnable(path: Path, changes: list[str] | None) -> JobSpec:
    """Check what takes no tokenizer; the rest is checked when the job is prepared."""
    spec = load_job_spec(path, changes)
    require_files(spec, str(path))
    return spec


def load_job(path: Path, changes: list[str] | None) -> JobSpec:
    """Load a spec to submit; its loggers must be installed."""
    spec = load_runnable(path, changes)
    refuse_missing(spec.loggers, str(path))
    return spec
