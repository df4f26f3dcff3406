"""tlt ledger: show where a run's time went and what speculation saved."""

from collections import defaultdict
from collections.abc import Mapping

from rich.table import Table

from cli.arguments import JobOrFolder, Json, SessionName
from cli.drafter_tables import print_drafter_training
from cli.evaluation_tables import print_evaluations
from cli.output import console, number_table, print_json, say
from tlt.base.human_format import words
from tlt.policies.speculation.savings_estimate import Savings, SavingsInterval
from tlt.report import Acceptance, Snapshot
from tlt.runs.run_folder_reader import read_snapshot
from tlt.session.client import run_folder


def ledger(job: JobOrFolder, session: SessionName = "default", json: Json = False) -> None:
    """Show seconds by step, worker and duty, and what speculation saved."""
    snapshot = read_snapshot(run_folder(job, session))
    if json:
        print_json(snapshot)
        return
    for table in (*seconds_tables(snapshot), _workers(snapshot), _rollouts(snapshot)):
        if table.row_count:
            console.print(table)
    if snapshot.savings is not None:
        console.print(_savings(snapshot.savings))
    if snapshot.acceptance:
        console.print(_acceptance(snapshot))
        say(_positions(snapshot))
        say(describe_savings(snapshot))
    if snapshot.drafter_training is not None:
        print_drafter_training(snapshot.drafter_training)
    if snapshot.evals:
        print_evaluations(snapshot.evals)
        if (gain := snapshot.evals[-1].gain) is not None:
            say(f"the last evaluation against the first one: {gain.describe()}")
    say(
        f"device-seconds {snapshot.device_seconds:.1f}; "
        f"trained on {100 * snapshot.trained_share:.1f} % of the tokens of training rollouts"
    )


def describe_savings(snapshot: Snapshot) -> str:
    saved = snapshot.savings
    if saved is None:
        return "speculation: savings not known yet, too few steps were decoded without it"
    return (
        f"speculation saved {describe_interval(saved.total)} on all ranks, "
        f"which would have taken {saved.plain_seconds:.1f} s without; "
        f"overhead of speculation {saved.overhead:.1f} s, "
        f"{saved.runs} control runs of {saved.control_seconds:.1f} s "
        f"that cost {saved.control_cost:.1f} s"
        + ("; it cost more than it saved and is paused" if snapshot.gave_up else "")
    )


def seconds_tables(snapshot: Snapshot) -> tuple[Table, Table]:
    """Return the job's seconds by phase, and each worker's by duty."""
    workers = {str(worker): spent for worker, spent in sorted(snapshot.workers.items())}
    return (
        _seconds_table("phase", {"job": snapshot.phases}),
        _seconds_table("duty", workers),
    )


def describe_interval(saving: SavingsInterval | None) -> str:
    """Return seconds with their 95 % interval, and no text without a saving."""
    if saving is None:
        return ""
    return f"{saving.seconds:.1f} s (95 %: {saving.low:.1f} to {saving.high:.1f})"


def _seconds_table(by: str, spent: Mapping[str, Mapping[str, float]]) -> Table:
    columns = sorted({column for row in spent.values() for column in row})
    table = number_table(f"seconds by {by}", *map(words, columns), "total")
    for name, row in spent.items():
        values = [row.get(column, 0.0) for column in columns]
        table.add_row(name, *(f"{value:.1f}" for value in (*values, sum(values))))
    return table


def _workers(snapshot: Snapshot) -> Table:
    """Return a row for each step and worker, which adds up to the seconds of the step."""
    duties = sorted({d for a in snapshot.accounts for spent in a.workers.values() for d in spent})
    table = number_table("step", "worker", *map(words, duties), "total", "empty slots")
    for account in snapshot.accounts:
        for worker, spent in sorted(account.workers.items()):
            values = [*(spent.get(duty, 0.0) for duty in duties), sum(spent.values())]
            empty = ""
            if (rollout := account.rollout) is not None:
                empty = _percent(
                    rollout.empty_slot_seconds.get(worker, 0.0),
                    rollout.slot_seconds.get(worker, 0.0),
                )
            numbers = (f"{value:.1f}" for value in values)
            table.add_row(str(account.step), worker, *numbers, empty)
    return table


def _rollouts(snapshot: Snapshot) -> Table:
    table = number_table(
        *("step", "seconds", "device-seconds", "50 % done", "90 %", "99 %"),
        *("empty slots", "trained on", "saved", "saved of the wait"),
    )
    for account in snapshot.accounts:
        if (rollout := account.rollout) is None:
            continue
        times = (rollout.done_50, rollout.done_90, rollout.done_99)
        table.add_row(
            str(account.step),
            *(f"{value:.1f}" for value in (account.seconds, account.device_seconds, *times)),
            _percent(sum(rollout.empty_slot_seconds.values()), sum(rollout.slot_seconds.values())),
            f"{100 * rollout.trained_share:.0f} %",
            describe_interval(account.savings),
            describe_interval(account.wait_savings),
        )
    return table


def _savings(saved: Savings) -> Table:
    table = number_table(
        *("batch up to", "decode steps", "accept length", "ms a step"),
        *("ms without speculation", "control runs"),
    )
    for part in saved.buckets:
        table.add_row(
            str(part.bucket),
            str(part.steps),
            f"{part.tokens:.2f}",
            f"{1e3 * part.seconds:.3f}",
            f"{1e3 * part.plain:.3f}",
            str(part.runs),
        )
    return table


def _acceptance(snapshot: Snapshot) -> Table:
    """Return the accept lengths of each drafter by bucket."""
    buckets = sorted({part.bucket for part in snapshot.acceptance})
    table = number_table("accept length", *(f"up to {bucket}" for bucket in buckets), "all")
    rows: defaultdict[str, list[Acceptance]] = defaultdict(list)
    for part in snapshot.acceptance:
        rows["n-grams" if part.proposer == "ngram" else f"drafter {part.drafter}"].append(part)
    for name, parts in rows.items():
        by_bucket = [[part for part in parts if part.bucket == bucket] for bucket in buckets]
        table.add_row(name, *(_accept_length(some) for some in (*by_bucket, parts)))
    return table


def _accept_length(parts: list[Acceptance]) -> str:
    rows = sum(part.rows for part in parts)
    return f"{sum(part.tokens for part in parts) / rows:.2f}" if rows else ""


def _positions(snapshot: Snapshot) -> str:
    shares = " ".join(f"{100 * share:.0f}" for share in snapshot.positions[:16])
    return f"% of decode steps that accepted the first token, two tokens, ...: {shares or 'none'}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""
