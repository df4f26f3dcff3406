"""tlt ledger: where a run's time went and what speculation saved, while it runs or afterwards."""

from collections import defaultdict
from collections.abc import Mapping

from rich.table import Table

from cli.arguments import JobOrFolder, Json, SessionName
from cli.drafter_tables import print_drafting
from cli.output import console, print_json, say
from cli.session_client import run_folder
from tlt.ids import WorkerId
from tlt.policies.speculation.savings_estimate import Savings, SavingsInterval
from tlt.protocol.records import Joules
from tlt.report import Acceptance, Snapshot
from tlt.run_folder import read_snapshot


def ledger(
    job: JobOrFolder,
    session: SessionName = "default",
    json: Json = False,
) -> None:
    """Seconds by step, worker and duty, and what speculation saved of them."""
    snapshot = read_snapshot(run_folder(job, session))
    if json:
        print_json(snapshot)
        return
    for table in (*seconds_tables(snapshot), _workers(snapshot), _rollouts(snapshot)):
        if table.row_count:
            console.print(table)
    if snapshot.saved is not None:
        console.print(_saved(snapshot.saved))
    if snapshot.acceptance:
        console.print(_accepted(snapshot))
        say(_positions(snapshot))
        say(speculation_line(snapshot))
    if snapshot.drafting is not None:
        print_drafting(snapshot.drafting)
    say(
        f"device-seconds {snapshot.device_seconds:.1f}; {_joules(snapshot.joules)}"
        f"learned from {100 * snapshot.trained:.1f} % of the tokens of training rollouts"
    )


def _joules(spent: Joules | None) -> str:
    if spent is None:
        return ""
    parts = ((spent.host, "processors"), (spent.devices, "GPUs"))
    told = ", ".join(f"{joules:.0f} J by {what}" for joules, what in parts if joules is not None)
    return f"{told}; "


def speculation_line(snapshot: Snapshot) -> str:
    saved = snapshot.saved
    if saved is None:
        return "speculation: not compared with decoding without it, no control run is over yet"
    return (
        f"speculation saved {interval(saved.total)} on all ranks, from {saved.runs} control runs "
        f"of {saved.control_seconds:.1f} s that cost {saved.control_cost:.1f} s"
        + ("; it cost more than that and was given up" if snapshot.gave_up else "")
    )


def interval(saving: SavingsInterval | None) -> str:
    if saving is None:
        return ""
    if saving.low is None or saving.high is None:
        return f"{saving.seconds:.1f} s (± unknown)"
    return f"{saving.seconds:.1f} s (95 %: {saving.low:.1f} to {saving.high:.1f})"


def seconds_tables(snapshot: Snapshot) -> tuple[Table, Table]:
    """Where the time went: of the job by phase, of each worker by duty."""
    by_phase = _seconds_table("phase", {"job": snapshot.phases})
    by_duty = _seconds_table(
        "duty", {str(worker): spent for worker, spent in sorted(snapshot.workers.items())}
    )
    return by_phase, by_duty


def _seconds_table(by: str, spent: Mapping[str, Mapping[str, float]]) -> Table:
    columns = sorted({column for row in spent.values() for column in row})
    table = Table(f"seconds by {by}", *columns, "total", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in spent.items():
        values = [row.get(column, 0.0) for column in columns]
        table.add_row(name, *(f"{value:.1f}" for value in (*values, sum(values))))
    return table


def _workers(snapshot: Snapshot) -> Table:
    """Each step's row adds up to the seconds that passed."""
    duties = sorted({d for a in snapshot.accounts for spent in a.workers.values() for d in spent})
    table = _table("step", "worker", *duties, "total", "empty slots")
    for account in snapshot.accounts:
        for worker, spent in sorted(account.workers.items()):
            values = [*(spent.get(duty, 0.0) for duty in duties), sum(spent.values())]
            rollout = account.rollout
            empty = "" if rollout is None else _share(rollout.empty, rollout.slots, worker)
            numbers = (f"{value:.1f}" for value in values)
            table.add_row(str(account.step), worker, *numbers, empty)
    return table


def _rollouts(snapshot: Snapshot) -> Table:
    table = _table(
        *("step", "seconds", "device-seconds", "50 % done", "90 %", "99 %"),
        *("empty slots", "learned from", "saved", "of the wait"),
    )
    for account in snapshot.accounts:
        rollout = account.rollout
        if rollout is None:
            continue
        table.add_row(
            str(account.step),
            *(f"{value:.1f}" for value in (account.seconds, account.device_seconds)),
            *(f"{value:.1f}" for value in (rollout.done_50, rollout.done_90, rollout.done_99)),
            _percent(sum(rollout.empty.values()), sum(rollout.slots.values())),
            f"{100 * rollout.trained:.0f} %",
            interval(account.saved),
            interval(account.critical),
        )
    return table


def _saved(saved: Savings) -> Table:
    table = _table(
        *("batch up to", "tokens", "seconds", "ms a token", "without", "control runs", "saved")
    )
    for part in saved.buckets:
        borrowed = "" if part.measured_at == part.bucket else f" (from {part.measured_at})"
        table.add_row(
            str(part.bucket),
            f"{part.tokens:.0f}",
            f"{part.seconds:.1f}",
            f"{1e3 * part.seconds / part.tokens:.3f}" if part.tokens else "",
            f"{1e3 * part.plain:.3f}{borrowed}",
            str(part.runs),
            interval(part.saved),
        )
    return table


def _accepted(snapshot: Snapshot) -> Table:
    """Tokens of a round and row, for each drafter and bucket."""
    buckets = sorted({part.bucket for part in snapshot.acceptance})
    table = _table("tokens a round and row", *(f"up to {bucket}" for bucket in buckets), "all")
    rows: defaultdict[str, list[Acceptance]] = defaultdict(list)
    for part in snapshot.acceptance:
        rows["n-grams" if part.by == "ngram" else f"drafter {part.drafter}"].append(part)
    for name, parts in rows.items():
        by_bucket = [[part for part in parts if part.bucket == bucket] for bucket in buckets]
        table.add_row(name, *(_tokens_a_row(some) for some in (*by_bucket, parts)))
    return table


def _tokens_a_row(parts: list[Acceptance]) -> str:
    rows = sum(part.rows for part in parts)
    return f"{sum(part.tokens for part in parts) / rows:.2f}" if rows else ""


def _positions(snapshot: Snapshot) -> str:
    shares = " ".join(f"{100 * share:.0f}" for share in snapshot.positions[:16])
    return f"% of rounds that accepted the first draft, the first two, ...: {shares or 'none'}"


def _share(part: Mapping[WorkerId, float], whole: Mapping[WorkerId, float], name: WorkerId) -> str:
    return _percent(part.get(name, 0.0), whole.get(name, 0.0))


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
