"""Draw the screen of `tlt top`: lanes and figures, fitted to the terminal."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group
from rich.text import Text

from cli.ledger import describe_interval
from tlt.base.human_format import seconds, sparkline, words
from tlt.base.id_types import WorkerId
from tlt.dashboard.page_sections import Head, Sections
from tlt.dashboard.rollout_tail import TailView
from tlt.dashboard.run_fold import Run
from tlt.dashboard.session_feed import SessionView
from tlt.dashboard.session_health import natural_order
from tlt.dashboard.warnings_and_remedies import Advice, Urgency, by_urgency
from tlt.report.worker_lanes import OVER

# a character and a colour for each duty, either of which suffices to tell duties apart
_DUTIES = {
    "rollout": ("█", "blue"),
    "next_step": ("▚", "cyan"),
    "drafter_training": ("▒", "yellow"),
    "stopping": ("%", "magenta"),
    "policy_update": ("▓", "green"),
    "waiting_for_weights": ("-", "magenta"),
    "idle": ("·", "bright_black"),
    "restarting": ("~", "red"),
    "away": ("x", "red"),
    OVER: (" ", "default"),
}
_WINDOW = 120.0
_NAME = 6
_INDENT = 8
# the axis and the last line
_AROUND_LANES = 2
# rich needs a console to wrap words
_CONSOLE = Console(emoji=False)


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """The views that a screen is drawn from, beside the run itself."""

    head: Head
    now: float
    tail: TailView
    sections: Sections
    # None: the run is not one of a session that is up
    session: SessionView | None


class Screen:
    def __init__(self, run: Run, width: int, height: int) -> None:
        self._run = run
        self._width = max(40, width)
        self._height = max(12, height)

    def render(self, shown: Shown) -> Group:
        above = [self._title(shown.head, shown.now), *self._legend()]
        advice = [*shown.sections.advice]
        if shown.session is not None:
            advice += [*shown.session.advice, *_on_pause(shown.session, shown.head)]
        below = [
            *self._tail(shown.tail),
            *self._speculation(shown.sections),
            *self._learning(shown.sections),
            *(self._session(shown.session, shown.head) if shown.session else ()),
            *self._advice(by_urgency(advice)),
        ]
        lanes = self._lanes(shown.now, self._height - len(above) - len(below) - _AROUND_LANES)
        lines = [*above, *lanes, self._axis(shown.now), *below]
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
            words(head.phase),
            f"step {head.step}/{head.steps}",
            f"policy {head.version}",
            seconds(now),
            *(() if speed is None else (f"{speed:.0f} tokens/s",)),
        )
        return Text(head.job, style="bold").append("  " + "  ".join(parts), style="not bold")

    def _legend(self) -> list[Text]:
        legend = Text()
        for duty, (glyph, colour) in _DUTIES.items():
            if duty != OVER:
                legend.append(glyph, style=colour)
                legend.append(f" {words(duty)}  ", style="bright_black")
        return self._wrapped("", legend)

    def _lanes(self, now: float, room: int) -> list[Text]:
        workers = sorted(self._run.lanes.duties(), key=natural_order)
        room = max(2, min(len(workers), room))
        shown = workers if len(workers) <= room else workers[: room - 1]
        lines = [self._lane(worker, now) for worker in shown]
        if len(shown) < len(workers):
            lines.append(self._others(workers[len(shown) :]))
        return lines

    def _axis(self, now: float) -> Text:
        """Label the times at which the lanes begin and end."""
        begin, end = seconds(max(0.0, now - _WINDOW)), seconds(now)
        gap = max(1, self._width - _NAME - 2 - len(begin) - len(end))
        return Text(f"{'':{_NAME}} {begin}{' ' * gap}{end}", style="bright_black")

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
        """Count the duties of the workers that have no lane."""
        duties = self._run.lanes.duties()
        counted = Counter(duties[worker] for worker in workers)
        counts = ", ".join(f"{count} {words(duty)}" for duty, count in counted.most_common())
        return Text(f"{'…':>{_NAME}} {len(workers)} more: {counts}")

    def _tail(self, tail: TailView) -> list[Text]:
        if tail.current is None:
            return [Text("tail    no rollout batch yet")]
        text = f"{tail.current.answers}/{tail.current.expected} answers"
        if tail.seconds:
            text += f" after {seconds(tail.seconds)}"
        if (early := tail.early_end) is not None:
            text += (
                f", ends with {early.wanted} of {early.issued} groups, {early.complete} complete"
            )
        if tail.waiting_groups:
            text += f", {tail.waiting_groups} groups wait"
        if (ahead := tail.next_step) is not None:
            text += f", next step {ahead.finished}/{ahead.answers}"
        if tail.forecast is not None:
            text += f", the last in {seconds(tail.forecast.p50)} to {seconds(tail.forecast.p90)}"
        lengths = sparkline([float(n) for n in tail.lengths.counts])
        lines = [
            *self._wrapped("tail", text),
            *self._wrapped("lengths", f"{lengths} up to {tail.max_tokens} tokens"),
        ]
        if tail.longest:
            longest = (
                f"{one.prompt}·{one.member} {seconds(one.seconds)} ({one.worker or '?'})"
                for one in tail.longest[:3]
            )
            lines += self._wrapped("running", f"{tail.running}, the longest: {', '.join(longest)}")
        return lines

    def _speculation(self, sections: Sections) -> list[Text]:
        speculation = sections.speculation
        if speculation.mode == "off":
            return [Text("specul. off")]
        saved = speculation.savings
        savings = "not known yet" if saved is None else describe_interval(saved.total)
        rows = sum(part.rows for part in speculation.acceptance)
        tokens = sum(part.tokens for part in speculation.acceptance)
        accepted = f"accept length {tokens / rows:.2f}, " if rows else ""
        training = sections.drafter.account
        used = [each for each in (training.evaluations if training else ()) if each.adopted]
        drafter = f", drafter {used[-1].version} ({used[-1].accept_length:.2f})" if used else ""
        why = self._wrapped("", speculation.why) if speculation.why else []
        return [*self._wrapped("specul.", f"{accepted}saved {savings}{drafter}"), *why]

    def _learning(self, sections: Sections) -> list[Text]:
        steps, evals = sections.learning.steps, sections.learning.evals
        if not steps and not evals:
            return [Text("reward  no step has ended yet")]
        parts: list[str] = []
        if steps:
            rewards = [step.reward for step in steps]
            length = steps[-1].length.mean
            parts.append(f"{sparkline(rewards[-24:])} {rewards[-1]:.3f}, length {length:.0f}")
        if evals:
            parts.append(f"held out {evals[-1].mean:.3f} ± {evals[-1].stderr:.3f}")
            if len(sets := evals[-1].sets) > 1:
                parts += [f"{each.name} {each.mean:.3f}" for each in sets]
        return self._wrapped("reward", ", ".join(parts))

    def _session(self, session: SessionView, head: Head) -> list[Text]:
        health = session.health
        if health.error is not None:
            return []  # it is among the warnings
        queues = ", ".join(
            f"{stream.name}{f' ({stream.group})' if stream.group else ''} {stream.depth}"
            + (f", {stream.pending} delivered" if stream.pending else "")
            + (f", oldest {seconds(stream.oldest_seconds)}" if stream.oldest_seconds else "")
            for stream in health.streams
            if stream.job in (None, head.job)
        )
        beside = ", ".join(
            f"`tlt top {row.job}` ({row.workers})"
            for row in session.jobs
            if row.status == "running" and row.job != head.job
        )
        memory = 100 * health.memory_used / max(1, health.memory_total)
        text = (
            f"{health.all_workers} workers, {health.silent} silent, {health.rankless} starting, "
            f"{health.running} rows; memory {memory:.0f} %, load {health.load:.1f}, "
            f"Redis {health.redis_bytes / 2**20:.0f} MiB"
        )
        return [
            *(self._wrapped("queues", queues) if queues else ()),
            *self._wrapped("health", text),
            *(self._wrapped("beside", beside) if beside else ()),
        ]

    def _advice(self, advice: Sequence[Advice]) -> list[Text]:
        urgent = [one for one in advice if one.urgency < Urgency.NOTE][:2]
        wrapped = [
            self._wrapped("!", Text(f"{one.problem} {one.remedy}", style="red")) for one in urgent
        ]
        return [line for lines in wrapped for line in lines]

    def _wrapped(self, name: str, text: str | Text) -> list[Text]:
        """Wrap a text under one name."""
        wrapped = text if isinstance(text, Text) else Text(text)
        lines = wrapped.wrap(_CONSOLE, self._width - _INDENT)
        return [
            Text(f"{'' if number else name:{_INDENT}}").append_text(line)
            for number, line in enumerate(lines)
        ]

    def _log(self, room: int) -> list[Text]:
        lines = list(self._run.log_lines)[-room:]
        return [
            Text(f"{seconds(line.at):>12}  {line.text}", style="bright_black") for line in lines
        ]


def _on_pause(session: SessionView, head: Head) -> list[Advice]:
    """Say why the job is paused, if it is."""
    return [
        Advice(
            Urgency.SOON, f"The job is {row.pause}.", "Nothing is lost: it goes on where it was."
        )
        for row in session.jobs
        if row.job == head.job and row.pause is not None
    ]
