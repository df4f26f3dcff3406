"""Find the checkpoints in a run's folder, and choose one that another job can start from.

Data, seed, batch sizes and hyper-parameters of the two jobs may differ; their model must be the
same. With the same data and seed the new job begins where the other one's prompts ended; otherwise
the number of the step says where it stands in its own order of prompts.
"""

from collections.abc import Collection
from functools import partial
from pathlib import Path

import msgspec

from tlt.base.id_types import PolicyVersion, Step
from tlt.blobs.blob_files import committed_blobs
from tlt.errors import ConfigError
from tlt.models.safetensors_header import Shape, parse_shapes, read_folder_shapes
from tlt.policies.drafter.drafter_state import DrafterState
from tlt.policies.run.deferred_groups import put_behind
from tlt.protocol.commands import StartJob
from tlt.protocol.refs import Checkpoint, DrafterRef, PromptCursor, StartingCheckpoint
from tlt.report import Ledger
from tlt.runs.run_folder_reader import has_journal, journal_entries, open_ledger, read_spec
from tlt.spec.config import JobSpec

# a head that shares the embedding's weights may be stored, and older models' tables are
_STORED_APART = ("lm_head.weight", "rotary_emb.inv_freq")


def choose_checkpoint(run: Path, step: Step | None, spec: JobSpec) -> StartingCheckpoint:
    """Return the run's checkpoint after `step` steps (None: the last) for a job of this spec."""
    found = _find_checkpoints(run)
    if not found:
        raise ConfigError(f"{run.name} has no checkpoint")
    chosen = found[-1]
    if step is not None:
        steps = ", ".join(str(each.checkpoint.version) for each in found)
        there = [each for each in found if each.checkpoint.version == step]
        if not there:
            raise ConfigError(f"{run.name} has no checkpoint of step {step}; there are: {steps}")
        (chosen,) = there
    done, total = chosen.checkpoint.version, spec.algorithm.steps
    if done >= total > 0:
        raise ConfigError(
            f"{chosen.name}: {done} steps are done, and algorithm.steps is {total}: "
            "it counts the steps of both jobs together"
        )
    before = read_spec(run)
    if spec.policy.hub_id is None:
        _require_same_model(chosen, Path(spec.policy.path))
    _require_same_trained_weights(chosen, before, spec)
    if (before.data, before.seed) != (spec.data, spec.seed):
        chosen = msgspec.structs.replace(chosen, cursor=None)
    if not _goes_on_with_drafter(before, spec):
        chosen = msgspec.structs.replace(chosen, drafter=None, accept_length=None)
    return chosen


def keep_commit(spec: JobSpec, run: Path) -> JobSpec:
    """Return a spec that names the commit with which a run began, if its policy is of the Hub."""
    starts = (entry.event for entry in journal_entries(run) if isinstance(entry.event, StartJob))
    start, policy = next(starts, None), spec.policy
    if policy.hub_id is None or start is None:
        return spec
    began = start.prepared.hub_policy
    if began is None or began.id != policy.hub_id:
        name = start.spec.policy.path if began is None else began.id
        raise ConfigError(f"policy.path: {run.name} began with {name}: name that instead")
    if policy.revision not in (None, began.revision, began.commit):
        raise ConfigError(
            f"policy.revision: {run.name} began with {began.name}: leave the revision out"
        )
    return began.with_commit(spec)


def has_checkpoint(run: Path) -> bool:
    return bool(_find_checkpoints(run))


def _find_checkpoints(run: Path) -> list[StartingCheckpoint]:
    """Return the checkpoints whose files are still there, oldest first."""
    if not has_journal(run):
        return []
    ledger = open_ledger(run)
    saved: dict[PolicyVersion, tuple[Checkpoint, PromptCursor | None, DrafterState]] = {}
    for entry in journal_entries(run):
        event, state = entry.event, ledger.add(entry.event, entry.at).after
        checkpoint, cursor = state.policy.checkpoint, state.cursor
        if isinstance(event, StartJob) and event.starts_from is not None:
            cursor = event.starts_from.cursor  # the state has taken its first prompts already
        if checkpoint is not None and checkpoint.version not in saved:
            # a job that starts from it has no part of the groups that were begun before
            begun = (*state.carried, *(() if state.ahead is None else state.ahead.groups))
            cursor = None if cursor is None else put_behind(cursor, begun)
            saved[checkpoint.version] = (checkpoint, cursor, state.drafter)
    with committed_blobs(run) as blobs:
        there = blobs.committed_names()
    return [
        _starting_checkpoint(run, ledger, checkpoint, cursor, drafter, there)
        for checkpoint, cursor, drafter in saved.values()
        if all(blob.digest in there for blob in checkpoint.blobs)
    ]


def _starting_checkpoint(
    run: Path,
    ledger: Ledger,
    checkpoint: Checkpoint,
    cursor: PromptCursor | None,
    then: DrafterState,
    there: Collection[str],
) -> StartingCheckpoint:
    """Take the drafter in use at that time or, if it was discarded since, the last one."""
    drafters = [(state.adoption.used, state) for state in (then, ledger.state.drafter)]
    kept = ((d, state) for d, state in drafters if d is not None and d.weights.digest in there)
    drafter, state = next(kept, (None, then))
    return StartingCheckpoint(
        job=ledger.state.job,
        folder=str(run),
        checkpoint=checkpoint,
        cursor=cursor,
        drafter=drafter,
        accept_length=None if drafter is None else _accept_length(state, drafter),
    )


def _accept_length(state: DrafterState, drafter: DrafterRef) -> float | None:
    evaluations = state.evidence.evaluations
    return next((e.accept_length for e in evaluations if e.version == drafter.version), None)


def _require_same_model(start: StartingCheckpoint, folder: Path) -> None:
    weights = start.checkpoint.weights
    with committed_blobs(Path(start.folder)) as blobs:
        saved = parse_shapes(partial(blobs.read_committed, weights), f"{start.name}'s weights")
    model = read_folder_shapes(folder)
    known = [name for name in model if name in saved or not name.endswith(_STORED_APART)]
    for name in sorted({*saved, *known}):
        if saved.get(name) != model.get(name):
            here, there = _describe(saved.get(name)), _describe(model.get(name))
            raise ConfigError(
                f"{start.name} is of another model than {folder}: "
                f"{name} is {here} in the one, {there} in the other"
            )


def _require_same_trained_weights(
    start: StartingCheckpoint, before: JobSpec, after: JobSpec
) -> None:
    """Refuse where the optimiser's moments are of other weights than the job would train."""
    for key in ("lora", "freeze"):
        if getattr(before.policy, key) != getattr(after.policy, key):
            raise ConfigError(
                f"{start.name} has trained other weights: policy.{key} must be the same"
            )


def _describe(shape: Shape | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape))


def _goes_on_with_drafter(before: JobSpec, after: JobSpec) -> bool:
    """Return False if the spec names another drafter, or one of another layout, or trains none."""
    old, new = before.drafter, after.drafter
    return new.train != "off" and (old.path, old.layout) == (new.path, new.layout)
