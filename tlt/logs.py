"""Logs: JSON lines, one file per process, in the session's folder."""

from pathlib import Path

import structlog


def write_logs_to(folder: Path, process: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(
            file=open(folder / f"{process}.jsonl", "a", buffering=1)  # noqa: SIM115
        ),
        cache_logger_on_first_use=True,
    )
