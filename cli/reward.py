"""tlt reward: score answers with the rewards of a spec, before a job does."""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cli.arguments import Json, Set, SpecFile
from cli.output import complain, print_json, say
from tlt.data.columns import find_column
from tlt.data.dataset import read_rows
from tlt.errors import ConfigError
from tlt.report.statistics import mean
from tlt.rewards.process.weighted_rewards import Verdict, WeightedRewards
from tlt.spec.reward import RewardSpec
from tlt.spec.spec_files import load_rewards

app = typer.Typer(help="Try the rewards of a spec.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Keep `score` a subcommand."""


@app.command()
def score(
    spec: SpecFile,
    completion: Annotated[str | None, typer.Option(help="A model's answer.")] = None,
    answer: Annotated[str | None, typer.Option(help="The right answer.")] = None,
    row: Annotated[str, typer.Option(metavar="JSON", help="The row's columns.")] = "{}",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSONL or parquet file with the columns completion and answer."
        ),
    ] = None,
    source_key: Annotated[
        str, typer.Option(help="Column that names a row's source; without it all rewards score.")
    ] = "source",
    workers: Annotated[int, typer.Option(min=1, help="Answers scored at once.")] = 8,
    changes: Set = None,
    json: Json = False,
) -> None:
    """Score an answer, or each row of a file; of SPEC only `reward` is read."""
    rewards = load_rewards(spec, changes)
    if (completion is None) == (data is None):
        raise ConfigError("name either --completion or --data")
    if data is None:
        given = _parse_row(row) | {"completion": completion, "answer": answer}
        verdict = _score(rewards, [given], source_key)
        _print_verdict(rewards, verdict[0], json)
        return
    table: list[dict[str, Any]] = []
    for location, each in read_rows(data):
        if not isinstance(each.get("completion"), str):
            raise ConfigError(f"{location}: no text in the column completion")
        table.append(each)
    verdicts = _score(rewards, table, source_key, workers)
    for verdict in verdicts:
        print_json(_shown(rewards, verdict))
    scored = [verdict.reward for verdict in verdicts if verdict.reward is not None]
    if scored and not json:
        say(f"mean {mean(scored):.4f} over {len(scored)} of {len(verdicts)} answers")
    if any(map(_failed, verdicts)):
        raise typer.Exit(1)


def _parse_row(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--row: {error}") from error


def _score(
    specs: tuple[RewardSpec, ...], table: list[dict[str, Any]], source_key: str, workers: int = 1
) -> list[Verdict]:
    async def score_row(rewards: WeightedRewards, row: dict[str, Any]) -> Verdict:
        source = find_column(row, source_key)
        sources = None if source is None else [str(source)]
        return await rewards.score(row["completion"], row.get("answer"), row, sources=sources)

    async def score_all() -> list[Verdict]:
        rewards = WeightedRewards(specs, Path(os.devnull), workers)
        try:
            await rewards.start()
            return await asyncio.gather(*(score_row(rewards, row) for row in table))
        finally:
            await rewards.stop()

    return asyncio.run(score_all())


def _print_verdict(specs: tuple[RewardSpec, ...], verdict: Verdict, json: bool) -> None:
    print_json(_shown(specs, verdict))
    if verdict.error is not None and not json:
        complain(verdict.error)
    if _failed(verdict):
        raise typer.Exit(1)


def _failed(verdict: Verdict) -> bool:
    """Return True if an answer couldn't be scored; it may also be that no reward applies."""
    return verdict.reward is None and verdict.error is not None


def _shown(specs: tuple[RewardSpec, ...], verdict: Verdict) -> dict[str, Any]:
    shown: dict[str, Any] = {"reward": verdict.reward, "correct": verdict.correct}
    if verdict.parts:
        names = [spec.label for spec in specs]
        shown["parts"] = dict(zip(names, verdict.parts, strict=True))
    if verdict.error is not None:
        shown["error"] = verdict.error
    return shown
