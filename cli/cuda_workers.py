"""Check the machine before a session starts on GPUs, and choose its number of workers."""

from pathlib import Path

from cli.output import complain
from tlt.doctor import CudaState, Finding, check_machine, read_cuda_state
from tlt.errors import ConfigError


def choose_cuda_workers(workers: int | None, ranks: int, runs: Path, redis_url: str | None) -> int:
    """Return the number of workers: as many as there are devices for, unless it is given."""
    cuda = read_cuda_state()
    findings = check_machine(runs, cuda, wants_cuda=True)
    if redis_url is not None:
        findings = [finding for finding in findings if finding.what != "redis-server"]
    _refuse_missing(findings)
    for finding in findings:
        if finding.status == "warning":
            complain(f"warning: {_describe(finding)}")
    return _fitting_workers(workers, ranks, cuda)


def _refuse_missing(findings: list[Finding]) -> None:
    missing = [_describe(finding) for finding in findings if finding.status == "missing"]
    if missing:
        raise ConfigError(f"--device cuda: {'; '.join(missing)} (`tlt doctor` shows all)")


def _fitting_workers(workers: int | None, ranks: int, cuda: CudaState) -> int:
    devices = len(cuda.devices)
    most = devices // ranks
    if most == 0:
        raise ConfigError(f"--ranks {ranks}: a worker needs a device a rank; there are {devices}")
    if workers is not None and workers > most:
        raise ConfigError(
            f"--workers {workers} --ranks {ranks}: they need {workers * ranks} devices, "
            f"and there are {devices}"
        )
    return most if workers is None else workers


def _describe(finding: Finding) -> str:
    advice = f" ({finding.advice})" if finding.advice else ""
    return f"{finding.what}: {finding.found}{advice}"
