"""The metrics of a session and a run in the text format of Prometheus."""

from collections.abc import Iterator, Sequence

from tlt.dashboard import page_sections
from tlt.dashboard.run_feed import RunFeed
from tlt.dashboard.session_feed import SessionView
from tlt.policies.run.run_state import Duty, Phase
from tlt.report import Snapshot
from tlt.report.duties import AWAY, NEXT_STEP, WAITING_FOR_TOOLS, WAITING_FOR_WEIGHTS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_Sample = tuple[str, str, dict[str, str], float]


def exposition(session: SessionView | None, runs: Sequence[RunFeed]) -> str:
    """Return all metrics, as gauges: a counter that is folded again would look like a reset."""
    lines: list[str] = []
    described: set[str] = set()
    for name, about, labels, value in _samples(session, runs):
        if name not in described:
            described.add(name)
            lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge"]
        label_text = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{label_text}}} {value!r}" if label_text else f"{name} {value!r}")
    return "\n".join([*lines, ""])


def _samples(session: SessionView | None, runs: Sequence[RunFeed]) -> Iterator[_Sample]:
    samples = [
        *(_session(session) if session is not None else ()),
        *(sample for run in runs for sample in _run(run)),
    ]
    # the format wants all samples of a name together
    order = {name: index for index, name in enumerate(dict.fromkeys(each[0] for each in samples))}
    yield from sorted(samples, key=lambda each: order[each[0]])


def _session(view: SessionView) -> Iterator[_Sample]:
    health = view.health
    yield "tlt_session_up", "1 if the session is up", {}, float(view.up)
    yield "tlt_redis_up", "1 if the session's Redis answers", {}, float(health.error is None)
    yield "tlt_redis_bytes", "memory used by Redis", {}, float(health.redis_bytes)
    yield "tlt_dead_letters", "entries that could not be handled", {}, float(health.dead_letters)
    yield "tlt_workers", "workers that have sent a heartbeat", {}, float(health.all_workers)
    silent = "workers without a heartbeat for half a lease"
    yield "tlt_workers_silent", silent, {}, float(health.silent)
    yield "tlt_running_answers", "running answers", {}, float(health.running)
    for status in ("queued", "preparing", "running", "paused", "done", "failed", "cancelled"):
        count = sum(job.status == status for job in view.jobs)
        yield "tlt_jobs", "newest jobs by state", {"status": status}, float(count)
    for stream in health.streams:
        labels = {"stream": stream.name, "group": stream.group or ""}
        labels |= {} if stream.job is None else {"job": stream.job}
        yield "tlt_stream_entries", "entries in the stream", labels, float(stream.depth)
        yield "tlt_stream_pending", "entries not acknowledged", labels, float(stream.pending)
        oldest = "age of the stream's oldest entry"
        yield "tlt_stream_oldest_seconds", oldest, labels, stream.oldest_seconds


def _run(feed: RunFeed) -> Iterator[_Sample]:
    head, ledger = page_sections.head(feed.run, feed.followed), feed.run.ledger
    snapshot = ledger.snapshot(since=ledger.state.step)
    job = {"job": head.job}
    yield "tlt_step", "finished training steps", job, float(head.step)
    yield "tlt_steps_planned", "planned training steps", job, float(head.steps)
    yield "tlt_policy_version", "policy version used in rollouts", job, float(head.version)
    yield "tlt_batch_answers", "answers of the current rollout batch", job, float(head.expected)
    settled = "answers of the current rollout batch that are scored or dropped"
    yield "tlt_batch_settled", settled, job, float(head.settled)
    speed = "tokens decoded a second, over the last ten seconds"
    yield "tlt_tokens_per_second", speed, job, head.tokens_per_second or 0.0
    yield "tlt_worker_losses", "incarnations of workers that were lost", job, float(head.losses)
    for phase in Phase:
        spent = snapshot.phases.get(phase.value, 0.0)
        yield (
            "tlt_phase_seconds",
            "seconds of the job by phase",
            {**job, "phase": phase.value},
            spent,
        )
    reported = (NEXT_STEP, WAITING_FOR_WEIGHTS, WAITING_FOR_TOOLS, AWAY)
    for duty in (*(duty.value for duty in Duty), *reported):
        labels = {**job, "duty": duty}
        if duty != WAITING_FOR_TOOLS:  # it is charged when an answer is finished
            yield "tlt_workers_on_duty", "workers by duty", labels, float(head.duties.get(duty, 0))
        spent = sum(duties.get(duty, 0.0) for duties in snapshot.workers.values())
        yield "tlt_duty_seconds", "seconds of all workers by duty", labels, spent
    yield from _figures(snapshot, job)
    if snapshot.evals:
        mean = snapshot.evals[-1].mean
        yield "tlt_held_out_reward", "mean reward of the last evaluation", job, mean
        for each in snapshot.evals[-1].sets:
            of_set = {**job, "set": each.name}
            about = "mean reward of a set in the last evaluation"
            yield "tlt_held_out_set_reward", about, of_set, each.mean
        if feed.run.binary_rewards:
            yield "tlt_accuracy", "share of right answers in the last evaluation", job, mean


def _figures(snapshot: Snapshot, job: dict[str, str]) -> Iterator[_Sample]:
    if snapshot.savings is not None:
        total = snapshot.savings.total
        yield "tlt_savings_seconds", "seconds of all ranks saved by speculation", job, total.seconds
        yield "tlt_savings_seconds_low", "lower end of the 95 % interval", job, total.low
        yield "tlt_savings_seconds_high", "upper end of the 95 % interval", job, total.high
        overhead = snapshot.savings.overhead
        yield "tlt_speculation_overhead_seconds", "cost of being able to speculate", job, overhead
    if snapshot.steps:
        step = snapshot.steps[-1]
        yield "tlt_reward", "mean reward of the last step", job, step.reward
        yield "tlt_answer_tokens", "mean answer length of the last step", job, step.length.mean
        replaced = step.replaced_groups
        yield "tlt_groups_replaced", "groups replaced in the last step", job, replaced
        yield (
            "tlt_answers_truncated",
            "share of answers that hit the token limit",
            job,
            step.truncated,
        )
        retracted = step.retractions
        yield "tlt_answers_retracted", "answers put off for lack of memory", job, retracted
    metrics = next((step.metrics for step in reversed(snapshot.steps) if step.metrics), None)
    if metrics is not None:
        yield "tlt_entropy", "entropy of the policy in nats a token", job, metrics.entropy
        yield "tlt_sampling_kl", "KL to the sampling policy", job, metrics.sampling_kl
        yield "tlt_gradient_norm", "gradient norm before clipping", job, metrics.gradient_norm


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
