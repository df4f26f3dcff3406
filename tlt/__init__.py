"""Reinforcement learning of reasoning models, without the wait for the long tail."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlt.api.job_description import Job
    from tlt.api.reward_functions import reward
    from tlt.api.session import JobFailed, OpenSession, Run, Session, connect
    from tlt.environments.environment import Environment

__all__ = ["Environment", "Job", "JobFailed", "OpenSession", "Run", "Session", "connect", "reward"]

# loaded when they are used: every process of a session imports this package
_MODULES = {
    "Environment": "tlt.environments.environment",
    "Job": "tlt.api.job_description",
    "reward": "tlt.api.reward_functions",
}


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tlt' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES.get(name, "tlt.api.session")), name)
