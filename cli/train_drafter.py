"""tlt drafter train: train a drafter for a policy folder, before any job."""

import os
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

app = typer.Typer(help="Train drafters for speculative decoding.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `train` a subcommand although it is the only one."""


@app.command()
def train(
    policy: Annotated[Path, typer.Option(help="Model folder of the policy.")],
    out: Annotated[Path, typer.Option(help="The folder to write; must not exist.")],
    data: Annotated[
        Path | None, typer.Option(help="JSONL file of prompts and answers to train on.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file of prompts; the policy generates the answers.")
    ] = None,
    layout: Annotated[
        Literal["eagle", "eagle3"] | None,
        typer.Option(help="Layout of the drafter; eagle by default."),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(help="Folder of a drafter to start from instead of random weights."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to train on, repetitions included.")
    ] = 1_000_000,
    samples: Annotated[
        int, typer.Option(min=1, help="Answers to train on; their hidden states stay in memory.")
    ] = 1024,
    held_out: Annotated[
        int, typer.Option(min=1, help="Rows held out to evaluate the drafter.")
    ] = 32,
    max_context: Annotated[
        int, typer.Option(min=3, help="Tokens of a prompt and its answer.")
    ] = 2048,
    slots: Annotated[int, typer.Option(min=1, help="Answers generated at once.")] = 32,
    prompt_key: Annotated[str, typer.Option(help="Key of the prompt.")] = "prompt",
    answer_key: Annotated[str, typer.Option(help="Key of the answer, with --data.")] = "answer",
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Apply the policy's chat template.")
    ] = False,
    system_prompt: Annotated[
        str | None, typer.Option(help="System prompt for the chat template.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    json: Json = False,
) -> None:
    """Train a drafter that TLT and a stock SGLang can decode with.

    It uses all cores that it may use. If it is interrupted, the same command continues it.
    """
    if (data is None) == (prompts is None):
        raise ConfigError("give either --data (prompts and answers) or --prompts")
    if layout is not None and start is not None:
        raise ConfigError("--start says what layout the drafter has: leave --layout out")
    # By default torch's threads wait for each other in a loop of milliseconds, and where another
    # process has a core, training takes four times as long. It's read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from tlt.offline_drafter.resumable_training_files import TrainingPlan
    from tlt.offline_drafter.training import train_drafter

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
    cores = len(os.sched_getaffinity(0))
    tell: Callable[[str], None] = (lambda line: None) if json else say
    tell(f"cores used: {cores}")
    with _interruption() as interrupted:
        curve = train_drafter(plan, out, tell, interrupted, cores)
    if curve is None:
        complain("interrupted; the same command continues from here")
        raise typer.Exit(130)
    if json:
        print_json({"drafter": str(out), "curve": curve})
    else:
        say(f"{out}: a drafter of {policy}, {curve[-1].describe_accept_lengths()}")


@contextmanager
def _interruption() -> Generator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C; a second Ctrl-C raises KeyboardInterrupt."""
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)
