"""Make run folders as a session leaves them, from simulations."""

from pathlib import Path
from random import Random

import msgspec

from tests.simulation.walk import finish, random_world, step
from tests.simulation.world import JOB, World
from tlt.store.journal import FILE_NAME


def some_run(seed: int, steps: int = 200, *, ends: bool = True) -> World:
    """Simulate a job whose workers train the drafter and are sometimes lost."""
    chooser = Random(seed)
    world = random_world(chooser)
    for _ in range(steps):
        if world.ended:
            break
        step(world, chooser, 0.02, 0.1)
    if ends:
        finish(world)
    return world


def write_run(world: World, runs: Path, lines: int | None = None) -> Path:
    folder = runs / str(JOB)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_bytes(msgspec.json.encode(world.spec))
    write_journal(world, folder, lines)
    return folder


def write_journal(world: World, folder: Path, lines: int | None = None) -> None:
    (folder / FILE_NAME).write_bytes(b"".join(line + b"\n" for line in world.journal[:lines]))
