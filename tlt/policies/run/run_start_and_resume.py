"""Start a job's run, from a checkpoint if it has one, and resume it under a new coordinator."""

from tlt.base.id_types import Step
from tlt.policies.algorithm import prompt_mixture
from tlt.policies.drafter.bases_and_deltas import Lineage, begin_new_root
from tlt.policies.drafter.training_evidence import TrainingEvidence
from tlt.policies.drafter.used_and_fallback_drafters import Adoption
from tlt.policies.run import (
    chosen_sizes,
    deferred_groups,
    drafter_outcomes,
    drafter_training_scheduler,
    phase_transitions,
    policy_updates,
    rollout_batch_opening,
    worker_membership,
)
from tlt.policies.run.run_state import Phase, Turn
from tlt.protocol.commands import StartJob
from tlt.protocol.events import SessionResumed
from tlt.protocol.refs import DrafterRef, StartingCheckpoint
from tlt.protocol.shared_values import Prepared, PromptSet
from tlt.spec.config import JobSpec


def _use_checkpoint(turn: Turn, start: StartingCheckpoint) -> None:
    saved = start.checkpoint
    turn.set(step=Step(saved.version), cursor=start.cursor)
    turn.set_policy(
        initial_version=saved.version,
        version=saved.version,
        target_version=saved.version,
        current=saved.policy,
        checkpoint=saved,
    )
    if start.drafter is not None:
        _use_drafter(turn, start.drafter, start.accept_length)


def _use_drafter(turn: Turn, drafter: DrafterRef, accept_length: float | None) -> None:
    """Propose with the drafter, and train it further under versions after its own."""
    lineage, _ = begin_new_root(Lineage(newest_version=drafter.version), drafter)
    evidence = TrainingEvidence(initial_length=accept_length)
    turn.set_drafter(lineage=lineage, adoption=Adoption(used=drafter), evidence=evidence)


def start(turn: Turn, event: StartJob) -> None:
    if turn.state.phase is not Phase.STARTING:
        return
    prepared = event.prepared
    turn.set(
        epoch=event.epoch,
        spec=event.spec,
        folder=event.folder,
        train_prompts=prepared.train_prompts,
        eval_sets=prepared.eval_sets or _only_set(prepared),
    )
    chosen_sizes.begin(turn, event)
    if event.starts_from is not None:
        _use_checkpoint(turn, event.starts_from)
    if (cursor := turn.state.cursor) is not None:
        turn.set(cursor=deferred_groups.take_over(event.spec, cursor, prepared.train_prompts))
    complaint = _complain_of_few_prompts(event.spec, prepared)
    if complaint is not None:
        phase_transitions.end_job(turn, "failed", complaint)
        return
    if sources := prepared.train_sources:
        state = turn.state
        turn.set(cursor=prompt_mixture.begin(event.spec, state.cursor, state.step, sources))
    for info in event.workers:
        worker_membership.add(turn, info)
    if event.spec.algorithm.eval_every > 0:
        rollout_batch_opening.open_evaluation(turn)
    else:
        rollout_batch_opening.open_step(turn)
        rollout_batch_opening.assign_all(turn)


def _complain_of_few_prompts(spec: JobSpec, prepared: Prepared) -> str | None:
    size, rows = spec.algorithm.prompts_per_step, prepared.train_prompts
    surplus = spec.rollout.surplus(size)
    # prompts that are put off aren't among those that a step takes
    put_off = size - 1 if spec.rollout.defer_long else 0
    together = size + surplus + put_off
    if spec.algorithm.steps == 0:
        return None
    if size > rows:
        return f"algorithm.prompts_per_step is {size}, but data.train has {rows} rows"
    if surplus and together > rows:
        return (
            f"a step issues {size} prompts, and rollout.partial or defer_long {surplus} more: that "
            f"needs {together} rows, and data.train has {rows}"
        )
    if prepared.train_sources:
        return prompt_mixture.complain_of_small_source(spec, prepared.train_sources)
    return None


def resume(turn: Turn, event: SessionResumed) -> None:
    """Make lost updates again; other events report the workers lost that ended with the session."""
    if event.epoch <= turn.state.epoch:
        return
    turn.set(epoch=event.epoch)
    if event.blobs_kept:
        return
    drafter_outcomes.restart_lost(turn)
    policy_updates.return_to_checkpoint(turn)
    if policy_updates.is_published(turn.state):
        return
    if turn.state.phase not in (Phase.POLICY_UPDATE, Phase.PAUSED):
        turn.enter(Phase.POLICY_UPDATE)
        rollout_batch_opening.cut_ahead(turn)
        drafter_training_scheduler.stop_all(turn)
    policy_updates.abandon_update(turn, "the published weights were lost")
    phase_transitions.advance(turn)


def _only_set(prepared: Prepared) -> tuple[PromptSet, ...]:
    """Return the held-out prompts of a journal of an earlier version."""
    prompts = prepared.eval_prompts
    return (PromptSet(name="", prompts=prompts),) if prompts else ()
