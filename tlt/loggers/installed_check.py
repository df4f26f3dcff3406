"""Whether what a spec's `loggers` name is installed; it is asked before a job is queued."""

from collections.abc import Sequence
from importlib.util import find_spec

from tlt.errors import ConfigError

# what is imported of each, and what to install
_NEEDED = {
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
        module, packages = _NEEDED[logger]
        if not _is_there(module):
            raise ConfigError(
                f"{where}: loggers: {logger} is not installed: pip install {packages}"
            )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is what it lies in
        return False
