"""Tables of drafter training: device seconds, evaluated drafters, decisions."""

from rich.table import Table

from cli.output import console, number_table, say
from tlt.report import DrafterTraining
from tlt.report.journal_log_lines import describe_decision

_LAST = 12


def print_drafter_training(training: DrafterTraining) -> None:
    if training.decisions or training.micro_batches:
        console.print(_seconds(training))
        console.print(_drafters(training))
        decisions = [d for d in training.decisions if d.kind not in ("adopt", "reject")]
        for decision in decisions[-_LAST:]:
            say(f"step {decision.step}: {describe_decision(decision)}")
    for error in training.divergences[-_LAST:]:
        say(f"drafter training discarded by {error}")
    for error in training.refusals[-_LAST:]:
        say(f"drafter refused by {error}")


def _seconds(training: DrafterTraining) -> Table:
    table = number_table("drafter training", "")
    idle, tokens = training.idle, training.tokens
    kept = f"{100 * training.idle_kept / idle:.0f} %" if idle else "no idle time"
    batches = f"{training.stop_p99_micro_batches:.2f} micro-batches"
    for name, value in (
        ("idle device-seconds", f"{idle:.1f}"),
        ("  not used", f"{training.idle_left:.1f}"),
        ("  in micro-batches that were kept", f"{training.idle_kept:.1f} ({kept})"),
        ("reading other workers' answers", f"{training.reading_seconds:.1f}"),
        (
            "merging, evaluating, publishing",
            f"{training.merging_seconds + training.publishing_seconds:.1f}",
        ),
        ("in micro-batches that were dropped", f"{training.dropped_seconds:.1f}"),
        ("micro-batches", f"{training.micro_batches}"),
        ("  median, as a member last reported it", f"{1e3 * training.median_seconds:.0f} ms"),
        ("  95th percentile of each delta's longest", f"{1e3 * training.longest_p95:.0f} ms"),
        ("tokens from own answers", f"{tokens.own}"),
        ("  from other workers' answers", f"{tokens.others}"),
        ("  from unfinished answers", f"{tokens.unfinished}"),
        ("  from earlier steps", f"{tokens.earlier}"),
        ("discarded because training diverged", f"{len(training.divergences)} times"),
        ("stopped by command", f"{training.stops} times"),
        ("  time until stopped, median", f"{1e3 * training.stop_p50:.0f} ms"),
        ("  time until stopped, 99 %", f"{1e3 * training.stop_p99:.0f} ms ({batches})"),
    ):
        table.add_row(name, value)
    return table


def _drafters(training: DrafterTraining) -> Table:
    table = Table("drafter", "step", "micro-batches", "accept length", "before", "", box=None)
    for each in training.evaluations[-_LAST:]:
        table.add_row(
            str(each.version),
            str(each.step),
            str(each.micro_batches),
            f"{each.accept_length:.2f}",
            "" if each.accept_length_before is None else f"{each.accept_length_before:.2f}",
            "used" if each.adopted else "",
        )
    return table
