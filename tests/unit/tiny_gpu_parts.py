"""Parts for the acceptance's supervisor that need no torch, and take what time they are given."""

import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcomes import Check, Figures


def _find() -> Figures:
    return {"figure": np.float64(7), "version": Path("2.11")}


def _fail() -> Figures:
    raise AssertionError("two is more than one")


def _wait() -> Figures:
    time.sleep(600)
    return {}


def _die() -> Figures:
    os._exit(3)


@contextmanager
def quick(machine: Machine) -> Generator[Mapping[str, Check]]:
    yield {"fail": _fail, "find": _find}


@contextmanager
def slow(machine: Machine) -> Generator[Mapping[str, Check]]:
    yield {"find": _find, "wait": _wait}


@contextmanager
def deadly(machine: Machine) -> Generator[Mapping[str, Check]]:
    yield {"die": _die}


@contextmanager
def unprepared(machine: Machine) -> Generator[Mapping[str, Check]]:
    raise ValueError("nothing to prepare")
    yield {}
