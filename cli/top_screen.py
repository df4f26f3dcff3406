"""What `tlt top` shows: lanes and figures, in as many columns and lines as there are."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from cli.report import spark
from tlt.dashboard.advice import Advice, Urgency
from tlt.dashboard.run import Run
from tlt.dashboard.tail import TailView
from tlt.dashboard.views import Head, Sections
from tlt.policies.ledger.drafted import Measured
from tlt.policies.ledger.lanes import OVER
from tlt.policies.saved import Saving
from tlt.types import WorkerId
from tlt.wording import seconds

# a character and a colour for each duty: one is enough to tell them apart
_DUTIES = {
    "rollout": ("█", "blue"),
    "draft": ("▒", "yellow"),
    "preempting": ("%", "magenta"),
    "learn": ("▓", "green"),
    "idle": ("·", "bright_black"),
    "leaving": ("~", "red"),
    "away": ("x", "red"),
    OVER: (" ", "default"),
}
_WINDOW = 120.0
_NAME = 6
# lines that are no lanes and no log
_FIXED = 11


class Screen:
    def __init__(self, run: Run, width: int, height: int) -> None:
        self._run = run
        self._width = max(40, width)
        self._height = max(12, height)

    def render(self, head: Head, now: float, tail: TailView, sections: Sections) -> Group:
        lines = [
            self._title(head, now),
            self._legend(),
            *self._lanes(now),
            Text(),
            self._tail(tail),
            *self._speculation(sections),
            self._learning(sections),
            *self._advice(sections.advice),
        ]
        room = self._height - len(lines) - 2
        if room > 0:
            lines += [Text(), *self._log(room)]
        for line in lines:
            line.truncate(self._width, overflow="ellipsis")
            line.no_wrap = True
        return Group(*lines[: self._height - 1], Text("q quits", style="bright_black"))

    def _title(self, head: Head, now: float) -> Text:
        speed = head.tokens_per_second
        parts = (
            head.status,
            head.phase,
            f"step {head.step}/{head.steps}",
            f"policy {head.version}",
            seconds(now),
            *(() if speed is None else (f"{speed:.0f} tokens/s",)),
        )
        return Text(head.job, style="bold").append("  " + "  ".join(parts), style="not bold")

    def _legend(self) -> Text:
        legend = Text(" " * _NAME + " ")
        for duty, (glyph, colour) in _DUTIES.items():
            if duty != OVER:
                legend.append(glyph, style=colour).append(f" {duty}  ", style="bright_black")
        return legend

    def _lanes(self, now: float) -> list[Text]:
        workers = sorted(self._run.lanes.duties(), key=_natural)
        room = max(1, min(len(workers), self._height - _FIXED))
        shown = workers if len(workers) <= room else workers[: room - 1]
        lines = [self._lane(worker, now) for worker in shown]
        if len(shown) < len(workers):
            lines.append(self._others(workers[len(shown) :]))
        return lines

    def _lane(self, worker: WorkerId, now: float) -> Text:
        changes = self._run.lanes.lane(worker)
        times = [change.at for change in changes]
        width = self._width - _NAME - 2
        begin = max(0.0, now - _WINDOW)
        line = Text(f"{worker:>{_NAME}} ")
        for column in range(width):
            at = begin + (now - begin) * (column + 0.5) / width
            index = bisect_right(times, at) - 1
            glyph, colour = _DUTIES[changes[index].duty] if index >= 0 else (" ", "default")
            line.append(glyph, style=colour)
        return line

    def _others(self, workers: Sequence[WorkerId]) -> Text:
        """So many workers that they are counted."""
        duties = self._run.lanes.duties()
        counted = Counter(duties[worker] for worker in workers)
        said = ", ".join(f"{count} {duty}" for duty, count in counted.most_common())
        return Text(f"{'…':>{_NAME}} {len(workers)} more: {said}")

    def _tail(self, tail: TailView) -> Text:
        if tail.now is None:
            return Text("tail    no round yet")
        done = len(self._run.ledger.round.lengths)
        said = f"tail    {done}/{tail.now.expected} answers"
        if tail.seconds:
            said += f" after {seconds(tail.seconds)}"
        if tail.longest:
            held = tail.longest[0]
            said += f", longest {seconds(held.seconds)} ({held.worker or '?'})"
        if tail.forecast is not None:
            said += f", the last in {seconds(tail.forecast.p50)} to {seconds(tail.forecast.p90)}"
        return Text(f"{said}  lengths {spark([float(n) for n in tail.lengths.counts])}")

    def _speculation(self, sections: Sections) -> list[Text]:
        told = sections.speculation
        if told.mode == "off":
            return [Text("guess   off")]
        saved = "not compared yet" if told.saved is None else _saved(told.saved.total)
        rows = sum(part.rows for part in told.acceptance)
        tokens = sum(part.tokens for part in told.acceptance)
        accepted = f"{tokens / rows:.2f} tokens a round and row, " if rows else ""
        used = [each for each in _measured(sections) if each.adopted]
        drafter = f", drafter {used[-1].version} ({used[-1].trained:.2f})" if used else ""
        return [Text(f"guess   {accepted}saved {saved}{drafter}"), Text(f"        {told.why}")]

    def _learning(self, sections: Sections) -> Text:
        steps, evals = sections.learning.steps, sections.learning.evals
        if not steps:
            return Text("reward  no step is over yet")
        rewards = [step.reward for step in steps]
        said = (
            f"reward  {spark(rewards[-24:])} {rewards[-1]:.3f}, length {steps[-1].length.mean:.0f}"
        )
        if evals:
            said += f", held out {evals[-1].mean:.3f} ± {evals[-1].stderr:.3f}"
        return Text(said)

    def _advice(self, advice: Sequence[Advice]) -> list[Text]:
        urgent = [one for one in advice if one.urgency < Urgency.NOTE][:2]
        return [Text(f"! {one.what} {one.do}", style="red") for one in urgent]

    def _log(self, room: int) -> list[Text]:
        lines = list(self._run.lines)[-room:]
        return [
            Text(f"{seconds(line.at):>12}  {line.text}", style="bright_black") for line in lines
        ]


def _measured(sections: Sections) -> Sequence[Measured]:
    account = sections.drafter.account
    return () if account is None else account.measured


def _saved(saving: Saving) -> str:
    if saving.low is None or saving.high is None:
        return f"{saving.seconds:.1f} s (not yet sure)"
    return f"{saving.seconds:.1f} s ({saving.low:.1f} to {saving.high:.1f})"


def _natural(name: WorkerId) -> tuple[int, str]:
    return len(name), name
