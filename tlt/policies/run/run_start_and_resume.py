"""Start a job's run, and resume it after its coordinator was replaced."""

from tlt.policies.algorithm import prompt_mixture
from tlt.policies.run import (
    drafter_event_handling,
    phase_transitions,
    policy_updates,
    rollout_batch_opening,
    start_from_checkpoint,
    training_sessions,
    worker_membership,
)
from tlt.policies.run.run_state import Phase, Turn
from tlt.protocol.commands import StartJob
from tlt.protocol.events import SessionResumed
from tlt.protocol.shared_values import Prepared, PromptSet
from tlt.spec.config import JobSpec


def start(turn: Turn, event: StartJob) -> None:
    if turn.state.phase is not Phase.STARTING:
        return
    prepared = event.prepared
    turn.set(
        epoch=event.epoch,
        folder=event.folder,
        train_prompts=prepared.train_prompts,
        eval_sets=prepared.eval_sets or _only_set(prepared),
    )
    if event.starts_from is not None:
        start_from_checkpoint.use(turn, event.starts_from)
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


def _complain_of_few_prompts(spec: JobSpec, prepared: Prepared) -> str | None:
    size, rows = spec.algorithm.prompts_per_step, prepared.train_prompts
    if spec.algorithm.steps == 0:
        return None
    if size > rows:
        return f"algorithm.prompts_per_step is {size}, but data.train has {rows} rows"
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
    drafter_event_handling.restart_lost(turn)
    policy_updates.return_to_checkpoint(turn)
    if policy_updates.is_published(turn.state):
        return
    if turn.state.phase not in (Phase.POLICY_UPDATE, Phase.PAUSED):
        turn.enter(Phase.POLICY_UPDATE)
        training_sessions.stop_all(turn)
    policy_updates.abandon_update(turn, "the published weights were lost")
    phase_transitions.advance(turn)


def _only_set(prepared: Prepared) -> tuple[PromptSet, ...]:
    """Return the held-out prompts of a journal of an earlier version."""
    prompts = prepared.eval_prompts
    return (PromptSet(name="", prompts=prompts),) if prompts else ()
