"""tlt drafter train: a drafter for a policy folder, before its reinforcement learning starts."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from cli.arguments import Json
from cli.output import complain, print_json, say
from tlt.errors import ConfigError

app = typer.Typer(help="The drafter: what speculative decoding guesses with.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """So that `train` stays a command of its own while it is the only one."""


@app.command()
def train(
    policy: Annotated[Path, typer.Option(help="The model folder that it is to guess for.")],
    out: Annotated[Path, typer.Option(help="Where to write the drafter; must not exist.")],
    data: Annotated[
        Path | None, typer.Option(help="JSONL of prompts and answers to learn from.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of prompts that the policy answers itself.")
    ] = None,
    layout: Annotated[
        Literal["eagle", "eagle3"] | None, typer.Option(help="eagle if not given.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="A drafter's folder to go on from, not random weights.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="How many to learn from, repetitions included.")
    ] = 1_000_000,
    samples: Annotated[
        int, typer.Option(min=1, help="Answers to learn from; their states stay in memory.")
    ] = 1024,
    held_out: Annotated[
        int, typer.Option(min=1, help="Rows to measure by, which are not learned from.")
    ] = 32,
    max_context: Annotated[int, typer.Option(min=3, help="A prompt and its answer.")] = 2048,
    slots: Annotated[int, typer.Option(min=1, help="Answers that are written at once.")] = 32,
    prompt_key: str = "prompt",
    answer_key: Annotated[str, typer.Option(help="With --data.")] = "answer",
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Prompts are for the policy's chat template.")
    ] = False,
    system_prompt: str | None = None,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Train a drafter that this policy, or a stock SGLang, can decode with.

    Interrupted, the same command goes on where it was.
    """
    if (data is None) == (prompts is None):
        raise ConfigError("give either --data (prompts and answers) or --prompts")
    if layout is not None and start is not None:
        raise ConfigError("--start says what layout the drafter has: leave --layout out")
    from tlt.offline_drafter.training import train_drafter
    from tlt.offline_drafter.training_plan import TrainingPlan

    plan = TrainingPlan(
        policy=str(policy),
        file=str(data or prompts),
        answers_given=data is not None,
        layout=layout or "eagle",
        start=None if start is None else str(start),
        tokens=tokens,
        samples=samples,
        held_out=held_out,
        max_context=max_context,
        slots=slots,
        prompt_key=prompt_key,
        answer_key=answer_key,
        chat_template=chat_template,
        system_prompt=system_prompt,
        seed=seed,
    )
    with _interruption() as asked:
        curve = train_drafter(plan, out, (lambda line: None) if json else say, asked)
    if curve is None:
        complain("interrupted; the same command goes on from here")
        raise typer.Exit(130)
    if json:
        print_json({"drafter": str(out), "curve": curve})
    else:
        say(f"{out}: a drafter of {policy}, {curve[-1].describe_accept_lengths()}")


@contextmanager
def _interruption() -> Generator[Callable[[], bool]]:
    """The first Ctrl-C asks for an end, the second one makes it."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
