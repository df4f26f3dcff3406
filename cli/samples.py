"""tlt samples: print a run's answers with their prompts and rewards."""

from collections.abc import Iterable
from itertools import chain, groupby, islice
from typing import Annotated

import typer

from cli.arguments import JobOrFolder, Json, SessionName
from cli.output import print_json, say
from tlt.base.id_types import Purpose, Step
from tlt.blobs.answer_files import Turn
from tlt.errors import ConfigError
from tlt.runs.run_answers import AnswerRow, read_answers
from tlt.runs.run_folder_reader import read_spec
from tlt.session.client import run_folder

_PROMPTS = 5


def samples(
    job: JobOrFolder,
    evaluation: Annotated[
        bool, typer.Option("--eval", help="Print held-out answers instead of training answers.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(min=0, help="The step; by default the last one with answers.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--set", metavar="NAME", help="One evaluation set of --eval."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"Prompts; by default {_PROMPTS}, and all of them with --json."),
    ] = None,
    session: SessionName = "default",
    json: Json = False,
) -> None:
    """Print prompts with all of their answers, each with its reward; with --json, a line each."""
    run = run_folder(job, session)
    spec = read_spec(run)
    sets, only_evaluates = spec.data.evaluation_sets, spec.algorithm.steps == 0
    purpose: Purpose = "eval" if evaluation or only or only_evaluates else "train"
    if only is not None and only not in sets:
        raise ConfigError(f"--set {only}: {job} has {', '.join(sets) or 'no evaluation sets'}")
    rows = read_answers(run, purpose, None if step is None else Step(step), only)
    groups = groupby(rows, key=lambda row: row.prompt)
    shown = limit if limit is not None or json else _PROMPTS
    found = False
    for _, answers in islice(groups, shown):
        found = True
        _print_group(list(answers), json)
    if not found:
        what = "held-out answers" if purpose == "eval" else "answers"
        raise ConfigError(f"{job} has no {what}" + ("" if step is None else f" of step {step}"))


def _print_group(answers: list[AnswerRow], json: bool) -> None:
    if json:
        for answer in answers:
            print_json(answer)
        return
    first = answers[0]
    belongs = "" if first.set is None else f" of {first.set}"
    right = "" if first.right is None else f", right is {_one_line(first.right)}"
    say(f"=== step {first.step}, prompt {first.prompt}{belongs}{right}")
    say(first.question)
    for answer in answers:
        say(f"--- answer {answer.member}: {', '.join(_about(answer))}")
        if answer.turns:
            _print_turns(answer.turns)
            for number, turns in enumerate(answer.branches, start=2):
                say(f"(conversation {number})")
                _print_turns(turns)
        else:
            say(answer.text if answer.text is not None else "(the run's folder no longer has it)")


def _print_turns(turns: Iterable[Turn]) -> None:
    for turn in turns:
        say(f"[{turn.role}] {turn.text}")


def _about(answer: AnswerRow) -> Iterable[str]:
    yield "no reward" if answer.reward is None else f"reward {answer.reward:g}"
    if answer.final is not None:
        yield f"final answer {_one_line(answer.final)}"
    yield f"{answer.tokens} tokens" + (", cut off" if answer.stop == "length" else "")
    said = chain(answer.turns, *answer.branches)
    if (turns := sum(turn.role == "assistant" for turn in said)) > 1:
        yield f"{turns} turns" + (", the most it may have" if answer.stop == "turns" else "")
    if answer.error is not None:
        yield answer.error


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:60]}…"
