"""Before a job starts: what can be wrong with its model, data and reward is found and named.

Runs as a process of its own (`python -m tlt.prepare FOLDER`): reads spec.json in the run's
folder, writes the tokenised prompts beside it and says on stdout how many, or what is wrong.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tlt.config import JobSpec
from tlt.dataset import Prepared, Prompt, Prompts, prompts_file, rows
from tlt.errors import ConfigError, DataError, TltError
from tlt.loggers.installed import refuse_missing
from tlt.models.config_file import read_config
from tlt.models.tokenizer import Tokenizer
from tlt.rewards.verifiers import load_verifier


def prepare(folder: Path) -> Prepared:
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=JobSpec)
    policy = read_config(Path(spec.policy.path))
    positions = policy.max_positions
    limit = min(positions, spec.policy.max_context or positions)
    drafter = spec.drafter
    if drafter.train != "off" and drafter.path is None and drafter.layout == "eagle3":
        from tlt.models.drafter_folder import default_layers  # takes torch, which takes a moment

        default_layers(policy.layers)
    if spec.speculation.longest >= limit:
        raise ConfigError(
            f"speculation guesses {spec.speculation.longest} tokens at once, "
            f"in a context of {limit}"
        )
    tokenizer = Tokenizer(spec.policy.path)
    load_verifier(spec.reward)
    refuse_missing(spec.loggers, "spec")
    train = _tokenised(Path(spec.data.train), spec, tokenizer, limit, None)
    train_prompts = Prompts.write(prompts_file(folder, "train"), train)
    eval_prompts = 0
    if spec.data.eval is not None:
        held_out = _tokenised(Path(spec.data.eval), spec, tokenizer, limit, spec.data.eval_limit)
        eval_prompts = Prompts.write(prompts_file(folder, "eval"), held_out)
    return Prepared(train_prompts=train_prompts, eval_prompts=eval_prompts)


def _tokenised(
    path: Path, spec: JobSpec, tokenizer: Tokenizer, limit: int, most: int | None
) -> Iterator[Prompt]:
    for number, (place, row) in enumerate(rows(path, spec.data)):
        if most is not None and number >= most:
            return
        tokens = tokenizer.prompt_tokens(row[spec.data.prompt_key], spec.data, place)
        if not tokens:
            raise DataError(f"{place}: the prompt has no tokens")
        if len(tokens) >= limit:
            raise DataError(
                f"{place}: the prompt has {len(tokens)} tokens, which leaves no room in a "
                f"context of {limit}"
            )
        key = spec.data.answer_key
        yield Prompt(tokens=tokens, row=row, answer=None if key is None else row[key])


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        with contextlib.redirect_stdout(sys.stderr):  # importing a user's module may print
            prepared = prepare(folder)
    except TltError as error:
        prepared = Prepared(error=str(error))
    except OSError as error:
        prepared = Prepared(error=f"{error.filename or folder}: {error.strerror}")
    sys.stdout.buffer.write(msgspec.json.encode(prepared))


if __name__ == "__main__":
    main()
