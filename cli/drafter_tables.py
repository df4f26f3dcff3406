"""What training the drafter took and gave, in tables: idle seconds, drafters, decisions."""

from rich.table import Table

from cli.output import console, say
from tlt.report import Drafting
from tlt.report.log_lines import decision

_LAST = 12


def print_drafting(drafting: Drafting) -> None:
    if drafting.decisions or drafting.micro_batches:
        console.print(_seconds(drafting))
        console.print(_drafters(drafting))
        for line in _decisions(drafting):
            say(line)
    for spoiled in drafting.spoiled[-_LAST:]:
        say(f"undone, as said by {spoiled}")
    for refusal in drafting.refused[-_LAST:]:
        say(f"refused by {refusal}")


def _seconds(drafting: Drafting) -> Table:
    table = Table("training the drafter", "", box=None)
    table.columns[1].justify = "right"
    idle, tokens = drafting.idle, drafting.tokens
    harvested = f"{100 * drafting.harvested / idle:.0f} %" if idle else "no idle second"
    batches = f"{drafting.preempt_p99_micro_batches:.2f} micro-batches"
    for name, value in (
        ("idle device-seconds", f"{idle:.1f}"),
        ("  left alone", f"{drafting.idle_left:.1f}"),
        ("  in micro-batches that were kept", f"{drafting.harvested:.1f} ({harvested})"),
        ("device-seconds bought", f"{drafting.bought:.1f}"),
        ("  in micro-batches that were kept", f"{drafting.harvested_bought:.1f}"),
        ("reading what others wrote", f"{drafting.reading:.1f}"),
        ("merging, measuring, handing in", f"{drafting.merging + drafting.publishing:.1f}"),
        ("in micro-batches that were dropped", f"{drafting.dropped:.1f}"),
        ("micro-batches", f"{drafting.micro_batches}"),
        ("  of a member lately", f"{1e3 * drafting.typical_seconds:.0f} ms"),
        ("  the longest of a handing in, 95 %", f"{1e3 * drafting.longest_p95:.0f} ms"),
        ("tokens from own answers", f"{tokens.own}"),
        ("  from others'", f"{tokens.others}"),
        ("  from answers being written", f"{tokens.running}"),
        ("  from the step before", f"{tokens.previous}"),
        ("undone, for what was trained was spoiled", f"{len(drafting.spoiled)} times"),
        ("stopped when told", f"{drafting.preempted} times"),
        ("  within, half of the times", f"{1e3 * drafting.preempt_p50:.0f} ms"),
        ("  99 % of the times", f"{1e3 * drafting.preempt_p99:.0f} ms ({batches})"),
    ):
        table.add_row(name, value)
    return table


def _drafters(drafting: Drafting) -> Table:
    table = Table("drafter", "step", "micro-batches", "accept length", "before", "", box=None)
    for made in drafting.measured[-_LAST:]:
        table.add_row(
            str(made.version),
            str(made.step),
            str(made.micro_batches),
            f"{made.trained:.2f}",
            "" if made.used is None else f"{made.used:.2f}",
            "used" if made.adopted else "",
        )
    return table


def _decisions(drafting: Drafting) -> list[str]:
    some = [d for d in drafting.decisions if d.what not in ("adopt", "reject")][-_LAST:]
    return [f"step {d.step}: {decision(d.what, d.saved, d.cost, d.why)}" for d in some]
