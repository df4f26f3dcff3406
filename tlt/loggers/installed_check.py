"""Check that the packages of a spec's `loggers` are installed, before a job is queued."""

from collections.abc import Sequence
from importlib.util import find_spec

from tlt.errors import ConfigError

# the module that each logger imports, and the packages to install
PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
    "opentelemetry": (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    ),
}


def refuse_missing(loggers: Sequence[str], where: str) -> None:
    for logger in loggers:
        module, install = PACKAGES[logger]
        if not _is_installed(module):
            raise ConfigError(f"{where}: loggers: {logger} is not installed: pip install {install}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
