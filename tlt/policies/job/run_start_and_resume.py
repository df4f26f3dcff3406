"""Start a job's run, and resume it after its coordinator was replaced."""

from tlt.policies.drafter import drafter_event_handling, training_sessions
from tlt.policies.job import (
    phase_transitions,
    policy_updates,
    prompt_mixture,
    rollout_batch_opening,
    starting_checkpoint,
    worker_membership,
)
from tlt.policies.job.run_state import Phase, Turn
from tlt.protocol.events import JobStarted, SessionResumed
from tlt.protocol.shared_values import PromptSet


def start(turn: Turn, event: JobStarted) -> None:
    if turn.state.phase is not Phase.STARTING:
        return
    turn.set(
        epoch=event.epoch,
        folder=event.folder,
        train_prompts=event.train_prompts,
        eval_sets=event.eval_sets or _only_set(event),
    )
    if event.starts_from is not None:
        starting_checkpoint.use(turn, event.starts_from)
    complaint = _complain_of_few_prompts(event)
    if complaint is not None:
        phase_transitions.end_job(turn, "failed", complaint)
        return
    if event.train_sources:
        state = turn.state
        turn.set(
            cursor=prompt_mixture.begin(event.spec, state.cursor, state.step, event.train_sources)
        )
    for info in event.workers:
        worker_membership.add(turn, info)
    if event.spec.algorithm.eval_every > 0:
        rollout_batch_opening.open_evaluation(turn)
    else:
        rollout_batch_opening.open_step(turn)


def _complain_of_few_prompts(event: JobStarted) -> str | None:
    size = event.spec.algorithm.prompts_per_step
    if event.spec.algorithm.steps == 0:
        return None
    if size > event.train_prompts:
        return (
            f"algorithm.prompts_per_step is {size}, but data.train has {event.train_prompts} rows"
        )
    if event.train_sources:
        return prompt_mixture.complain_of_small_source(event.spec, event.train_sources)
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


def _only_set(event: JobStarted) -> tuple[PromptSet, ...]:
    """Return the held-out prompts of a journal of an earlier version."""
    return (PromptSet(name="", prompts=event.eval_prompts),) if event.eval_prompts else ()
