"""A new job starts from a checkpoint that is still there, and only with the same model."""

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from tests.simulation.specs import small_spec
from tests.simulation.walk import step
from tests.simulation.worker_events import JOB
from tests.simulation.world import World
from tlt.base.id_types import Step
from tlt.blobs.blob_files import place_blobs
from tlt.errors import ConfigError
from tlt.protocol.refs import PromptCursor, StartingCheckpoint
from tlt.runs.job_checkpoints import choose_checkpoint
from tlt.spec.config import DrafterSpec, JobSpec, LoraSpec, PolicySpec

_SHAPES = {"model.embed_tokens.weight": (6, 4), "model.norm.weight": (4,)}


def write_weights(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, file)


def spec_of(tmp_path: Path, **changes: Any) -> JobSpec:
    spec = small_spec(steps=16, checkpoint_every=2, train="always", merge_every=1)
    algorithm = msgspec.structs.replace(spec.algorithm, keep_all=True)
    policy = PolicySpec(path=str(tmp_path / "policy"))
    drafter = DrafterSpec(train="always", merge_every=1, keep_all=True)
    values = {"algorithm": algorithm, "policy": policy, "drafter": drafter, **changes}
    return msgspec.structs.replace(spec, **values)


def write_run(tmp_path: Path) -> tuple[Path, World]:
    """Write the folder of a run that has made 13 of its steps, and a policy's folder."""
    world, chooser = World(spec_of(tmp_path), [1, 1]), Random(0)
    while world.state.policy.version < 13:
        step(world, chooser, faults=0.0, overtaking=0.0)
    run = tmp_path / JOB
    for digest in world.committed:
        write_weights(run / "blobs" / digest, _SHAPES)
    (run / "journal.jsonl").write_bytes(b"".join(line + b"\n" for line in world.journal))
    (run / "spec.json").write_bytes(msgspec.json.encode(world.spec))
    # a tied head may be stored all the same
    write_weights(tmp_path / "policy" / "model.safetensors", {**_SHAPES, "lm_head.weight": (6, 4)})
    return run, world


def test_takes_the_last_checkpoint_and_the_drafter_in_use(tmp_path: Path) -> None:
    run, world = write_run(tmp_path)
    chosen = choose_checkpoint(run, None, spec_of(tmp_path))
    used = world.state.drafter.adoption.used
    assert used is not None
    assert (chosen.name, chosen.folder) == (f"{JOB}@12", str(run))
    assert chosen.checkpoint == world.state.policy.checkpoint
    assert chosen.drafter is not None
    assert (run / "blobs" / chosen.drafter.weights.digest).exists()
    assert chosen.accept_length is not None


def test_finds_the_same_in_a_store(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path)
    spec, store = spec_of(tmp_path), tmp_path / "store"
    here = choose_checkpoint(run, None, spec)
    (run / "blobs").rename(store)
    place_blobs(run, f"local://{store}")
    assert choose_checkpoint(run, None, spec) == here
    (store / here.checkpoint.weights.digest).unlink()
    assert choose_checkpoint(run, None, spec).name == f"{JOB}@10"


def test_takes_the_place_in_the_prompts_only_where_data_and_seed_are_the_same(
    tmp_path: Path,
) -> None:
    run, world = write_run(tmp_path)
    spec = spec_of(tmp_path)
    first = choose_checkpoint(run, Step(2), spec)
    assert first.cursor == PromptCursor(epoch=0, position=4)
    assert choose_checkpoint(run, Step(2), spec_of(tmp_path, seed=1)).cursor is None
    (run / "journal.jsonl").write_bytes(started_from(world, first))
    again = choose_checkpoint(run, Step(2), spec)
    assert again.cursor == first.cursor


def started_from(world: World, start: StartingCheckpoint) -> bytes:
    """Return the journal of a job that has just started from a checkpoint."""
    start = msgspec.structs.replace(start, drafter=None)  # which the simulation would not know
    return b"".join(line + b"\n" for line in World(world.spec, [1], starts_from=start).journal)


def test_takes_the_checkpoint_of_a_step_or_names_those_that_exist(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path)
    chosen = choose_checkpoint(run, Step(2), spec_of(tmp_path))
    assert chosen.checkpoint.version == 2
    with pytest.raises(ConfigError, match="no checkpoint of step 3; there are: 2, 4, 6, 8, 10, 12"):
        choose_checkpoint(run, Step(3), spec_of(tmp_path))
    (run / "blobs" / chosen.checkpoint.weights.digest).unlink()
    with pytest.raises(ConfigError, match="no checkpoint of step 2; there are: 4, 6, 8, 10, 12"):
        choose_checkpoint(run, Step(2), spec_of(tmp_path))


def test_a_drafter_that_was_discarded_gives_way_to_the_newest(tmp_path: Path) -> None:
    run, world = write_run(tmp_path)
    used = world.state.drafter.adoption.used
    assert used is not None
    before = choose_checkpoint(run, Step(10), spec_of(tmp_path)).drafter
    assert before is not None
    assert before != used
    (run / "blobs" / before.weights.digest).unlink()
    assert choose_checkpoint(run, Step(10), spec_of(tmp_path)).drafter == used


@pytest.mark.parametrize("drafter", [{"path": "elsewhere"}, {"layout": "eagle3"}])
def test_another_drafter_in_the_spec_replaces_the_one_of_the_job(
    tmp_path: Path, drafter: dict[str, Any]
) -> None:
    run, _ = write_run(tmp_path)
    spec = spec_of(tmp_path, drafter=DrafterSpec(train="always", **drafter))
    assert choose_checkpoint(run, None, spec).drafter is None


def test_refuses_a_job_without_further_steps(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path)
    algorithm = msgspec.structs.replace(spec_of(tmp_path).algorithm, steps=12)
    done = spec_of(tmp_path, algorithm=algorithm)
    with pytest.raises(ConfigError, match=r"12 steps are done, and algorithm\.steps is 12"):
        choose_checkpoint(run, None, done)


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        ({"model.norm.weight": (5,)}, "model.norm.weight is 4 in the one, 5 in the other"),
        (
            {"model.layers.0.mlp.up_proj.weight": (4, 4)},
            "model.layers.0.mlp.up_proj.weight is missing in the one, 4×4 in the other",
        ),
    ],
)
def test_refuses_another_model_by_the_name_of_a_weight(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], complaint: str
) -> None:
    run, _ = write_run(tmp_path)
    write_weights(tmp_path / "policy" / "model.safetensors", {**_SHAPES, **shapes})
    with pytest.raises(ConfigError, match=f"{JOB}@12 is of another model than .*: {complaint}"):
        choose_checkpoint(run, None, spec_of(tmp_path))


@pytest.mark.parametrize("changes", [{"lora": LoraSpec()}, {"freeze": ("*norm*",)}])
def test_refuses_to_train_other_weights_than_the_optimiser_knows(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    run, _ = write_run(tmp_path)
    policy = PolicySpec(path=str(tmp_path / "policy"), **changes)
    with pytest.raises(ConfigError, match=f"policy.{next(iter(changes))} must be the same"):
        choose_checkpoint(run, None, spec_of(tmp_path, policy=policy))


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="queued-1 has no checkpoint"):
        choose_checkpoint(tmp_path / "queued-1", None, spec_of(tmp_path))
