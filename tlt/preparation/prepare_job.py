"""Validate a job's model, data and reward, and tokenise its prompts, before the job starts.

Run with `-m` as a process of its own that receives run folders. For each it reads spec.json, writes
the tokenised prompts beside it, and reports how many there are or why it refuses the job. Its
imports take seconds, so it stays up and forks for each folder; the end of the fork undoes whatever
users' code did to the interpreter.
"""

import asyncio
import contextlib
import gc
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NoReturn

import msgspec

from tlt.base.child_process import die_with_parent, last_line
from tlt.base.own_functions import load_own_function
from tlt.data.columns import column_of, find_column, sources_of
from tlt.data.dataset import Prompt, Prompts, prompts_file, rows
from tlt.data.prompt_sorting import sort_prompts
from tlt.data.source_check import check_sources
from tlt.data.thoughts import opens_thought
from tlt.environments.verifiers_pool import open_pool
from tlt.errors import ConfigError, DataError, TltError
from tlt.loggers.installed_check import refuse_missing
from tlt.models.config_json import read_config
from tlt.models.decoder_spec import require_divisible
from tlt.models.hub_cache import find_hub_policy
from tlt.models.safetensors_header import read_folder_shapes
from tlt.models.tokenizer import Tokenizer
from tlt.preparation.default_speculation import complain_of_speculation
from tlt.protocol.shared_values import PreparationExit, Prepared, PromptSet
from tlt.rewards.process.weighted_rewards import WeightedRewards
from tlt.spec.config import DataSpec, JobSpec
from tlt.spec.data_and_algorithm import is_own_function
from tlt.spec.prompt_files import PromptFile, eval_files, train_files

_results = msgspec.json.Decoder(Prepared | str)


def prepare(folder: Path) -> Prepared:
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=JobSpec)
    hub_policy = find_hub_policy(spec.policy)
    if hub_policy is not None:
        spec = hub_policy.with_folder(spec)
    policy = read_config(Path(spec.policy.path))
    positions = policy.max_positions
    limit = min(positions, spec.policy.max_context or positions)
    width = spec.rollout.tensor_parallel
    require_divisible(width, policy.kv_heads, policy.intermediate, "policy")
    no_speculation = complain_of_speculation(spec, policy)
    if no_speculation is not None and not spec.may_fall_back:
        raise ConfigError(no_speculation)
    tokenizer = Tokenizer(spec.policy.path)
    asyncio.run(_check_rewards(spec, folder / "logs" / "reward-function.log"))
    asyncio.run(_check_environment(spec, folder / "logs" / "environment.log"))
    for key in ("loss", "advantage"):
        if is_own_function(name := getattr(spec.algorithm, key)):
            load_own_function(f"algorithm.{key}", name)
    refuse_missing(spec.loggers, "spec")
    check_sources(spec)
    reader = _PromptReader(spec, tokenizer, limit)
    train_sources = tuple(_write_train(spec, reader, prompts_file(folder, "train")))
    sets: list[PromptSet] = []
    eval_prompts = Prompts.write(prompts_file(folder, "eval"), _eval_prompts(spec, reader, sets))
    weights, trained = _count_weights(spec)
    return Prepared(
        policy_weights=weights,
        trained_weights=trained,
        train_prompts=sum(train_sources),
        train_sources=train_sources if spec.data.mixed else (),
        eval_prompts=eval_prompts,
        longest_prompt=reader.longest,
        eval_sets=tuple(sets),
        skipped_prompts=reader.skipped,
        hub_policy=hub_policy,
        no_speculation=no_speculation or msgspec.UNSET,
    )


def _count_weights(spec: JobSpec) -> tuple[int, int]:
    """Return the policy's weights, and those that are trained: with LoRA two thin matrices each."""
    shapes = read_folder_shapes(Path(spec.policy.path))
    weights, lora = sum(map(math.prod, shapes.values())), spec.policy.lora
    if lora is None:
        return weights, weights
    adapted = (shape for name, shape in shapes.items() if name.endswith("_proj.weight"))
    return weights, sum(lora.rank * sum(shape) for shape in adapted)


def _write_train(spec: JobSpec, reader: "_PromptReader", file: Path) -> list[int]:
    """Tokenise the training prompts, and return how many each source has.

    A job that only evaluates has none.
    """
    counts: list[int] = []

    def read_all() -> Iterator[Prompt]:
        for source in train_files(spec.data, spec.environment) if spec.algorithm.steps else ():
            counts.append(0)
            for prompt in _train_prompts(spec.data, source, reader):
                counts[-1] += 1
                yield prompt

    Prompts.write(file, read_all())
    return counts


def _train_prompts(data: DataSpec, source: PromptFile, reader: "_PromptReader") -> Iterator[Prompt]:
    """Yield a source's prompts; rows of a mixture have the same columns for the prompt."""
    for prompt in reader.read(source, order=data.order_by):
        if data.mixed:
            text = column_of(prompt.row, source.prompt.name)
            row = {**prompt.row, data.prompt_key: text, "source": source.name}
            yield msgspec.structs.replace(prompt, row=row)
        else:
            yield prompt


def _eval_prompts(
    spec: JobSpec, reader: "_PromptReader", sets: list[PromptSet]
) -> Iterator[Prompt]:
    """Yield the prompts of one evaluation set after the other, and list the sets."""
    for held_out in eval_files(spec.data, spec.environment):
        before, count = reader.skipped, 0
        limit = spec.data.evaluation_sets[held_out.name].limit or spec.data.eval_limit
        for prompt in reader.read(held_out, limit=limit):
            count += 1
            yield msgspec.structs.replace(prompt, set=held_out.name)
        sets.append(PromptSet(name=held_out.name, prompts=count, skipped=reader.skipped - before))


async def _check_rewards(spec: JobSpec, log: Path) -> None:
    """Load the rewards as the scorer will; raise ConfigError if one can't be loaded."""
    rewards = WeightedRewards(spec.rewards, log)
    try:
        await rewards.start()
    finally:
        await rewards.stop()


async def _check_environment(spec: JobSpec, log: Path) -> None:
    """Load the environment as a worker will; raise ConfigError if it can't be loaded."""
    if spec.environment:
        pool = open_pool(spec.environment, log)
        try:
            await pool.start()
        finally:
            pool.stop()


class _PromptReader:
    def __init__(self, spec: JobSpec, tokenizer: Tokenizer, context: int) -> None:
        self._data = spec.data
        self._tokenizer = tokenizer
        self._context = context
        self._most = spec.data.most_prompt_tokens(context)
        # rows that were left out so far
        self.skipped = 0
        # tokens of the longest of the others
        self.longest = 0

    def read(
        self, file: PromptFile, *, limit: int | None = None, order: str | None = None
    ) -> Iterator[Prompt]:
        """Tokenise at most `limit` prompts of a data file, in the order of a column."""
        found: Iterable[Prompt] = islice(self._read(file), limit)
        empty = True
        for prompt in found if order is None else sort_prompts(found, file.path, order):
            empty = False
            yield prompt
        if empty:
            raise DataError(
                f"{file.path}: all prompts have more than {self._most} tokens "
                f"(a context of {self._context}, data.max_prompt_tokens)"
            )

    def _read(self, file: PromptFile) -> Iterator[Prompt]:
        for location, row in rows(file):
            prompt = column_of(row, file.prompt.name)
            tools = None if file.tools is None else find_column(row, file.tools.name)
            text = self._tokenizer.prompt_text(prompt, self._data, location, tools)
            tokens = self._tokenizer.tokens_of(text, self._data)
            if not tokens:
                raise DataError(f"{location}: the prompt has no tokens")
            if len(tokens) > self._most:
                self._skip(location, len(tokens))
                continue
            self.longest = max(self.longest, len(tokens))
            yield Prompt(
                tokens=tokens,
                row=row,
                answer=None if file.answer is None else column_of(row, file.answer.name),
                sources=sources_of(row, file, location),
                room=self._context - len(tokens),
                in_thought=opens_thought(text),
            )

    def _skip(self, location: str, tokens: int) -> None:
        """Leave a row out, or refuse it, as the spec says."""
        self.skipped += 1
        if self._data.long_prompts == "refuse":
            raise DataError(
                f"{location}: the prompt has {tokens} tokens, and at most {self._most} fit "
                f"(a context of {self._context}, data.max_prompt_tokens)"
            )


def main() -> None:
    """Read one folder per line, as JSON, and answer each with one line."""
    gc.freeze()  # garbage collection in a fork would copy all imported objects
    while line := sys.stdin.buffer.readline():
        folder = Path(msgspec.json.decode(line, type=str))
        with TemporaryFile() as result, TemporaryFile() as output:
            server, child = os.getpid(), os.fork()
            if child == 0:
                _run_child(server, result, output, folder)
            _, status = os.waitpid(child, 0)
            ended = PreparationExit(
                code=os.waitstatus_to_exitcode(status),
                result=_decode_result(_read(result)),
                last_line=last_line(_read(output)),
            )
        sys.stdout.buffer.write(msgspec.json.encode(ended) + b"\n")
        sys.stdout.buffer.flush()


def _run_child(server: int, result: IO[bytes], output: IO[bytes], folder: Path) -> NoReturn:
    die_with_parent(signal.SIGKILL)()
    if os.getppid() != server:
        os._exit(1)  # the server ended before the signal was set
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    for stream in (sys.stdout, sys.stderr):  # importing a user's module may print
        os.dup2(output.fileno(), stream.fileno())
    with contextlib.redirect_stdout(sys.stderr):  # keeps the order of lines
        result.write(msgspec.json.encode(prepare_or_refuse(folder)))
        result.flush()
    os._exit(0)  # a normal exit would take a second to free the imported modules


def prepare_or_refuse(folder: Path) -> Prepared | str:
    """Return what was prepared, or why the job is refused."""
    try:
        return prepare(folder)
    except TltError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"


def _decode_result(result: bytes) -> Prepared | str | None:
    try:
        return _results.decode(result)
    except msgspec.DecodeError:
        return None


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


if __name__ == "__main__":
    main()
