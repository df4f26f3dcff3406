"""tlt eval: how a policy does on a spec's held-out data, in this process, without a session."""

import asyncio
import math
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.jobs import Json, Set
from cli.output import print_json, say
from cli.spec_loading import load_runnable
from tlt.config import JobSpec
from tlt.dataset import rows
from tlt.errors import ConfigError
from tlt.rewards.sandbox import RewardSandbox

if TYPE_CHECKING:
    from tlt.engine.base import Completion


def evaluate(
    spec: Annotated[Path, typer.Argument(help="The job's YAML file.")],
    policy: Annotated[
        Path | None, typer.Option(help="A model folder; the spec's policy if not given.")
    ] = None,
    changes: Set = None,
    json: Json = False,
) -> None:
    """Score a policy on the spec's data.eval."""
    loaded = load_runnable(spec, changes)
    if loaded.data.eval is None:
        raise ConfigError(f"{spec}: data.eval: an evaluation needs held-out data")
    model = str(policy.resolve()) if policy is not None else loaded.policy.path
    file = Path(loaded.data.eval)
    table = [row for _, row in islice(rows(file, loaded.data), loaded.data.eval_limit)]
    completions = _decode(loaded, model, table)
    rewards = asyncio.run(_score(loaded, [c.text for c in completions], table))
    mean = math.fsum(rewards) / len(rewards)
    spread = math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
    stderr = math.sqrt(spread / len(rewards))
    if json:
        print_json({"policy": model, "mean": mean, "stderr": stderr, "problems": len(rewards)})
    else:
        say(f"{mean:.3f} ± {stderr:.3f} on {len(rewards)} problems ({model})")


def _decode(spec: JobSpec, model: str, table: "list[dict[str, object]]") -> "list[Completion]":
    import torch

    from tlt.engine.base import NoiseKey, Request
    from tlt.engine.native import NativeEngine
    from tlt.ids import Member, PolicyVersion, PromptIndex, Step
    from tlt.models.model_folder import load_decoder
    from tlt.models.tokenizer import Tokenizer
    from tlt.ranks.rollout import sampling

    torch.set_num_threads(1)
    tokenizer = Tokenizer(model)
    policy = load_decoder(Path(model), getattr(torch, spec.policy.dtype))
    positions = policy.config.max_positions
    context = min(positions, spec.policy.max_context or positions)
    engine = NativeEngine(
        policy,
        decode_text=tokenizer.decode,
        slots=spec.rollout.slots,
        max_context=context,
        device=torch.device("cpu"),
        version=PolicyVersion(0),
    )
    requests: list[Request] = []
    for index, row in enumerate(table):
        prompt = tokenizer.prompt_tokens(
            row[spec.data.prompt_key], spec.data, f"data.eval, row {index + 1}"
        )
        requests.append(
            Request(
                id=index,
                prompt=prompt,
                key=NoiseKey(
                    seed=spec.seed,
                    step=Step(0),
                    purpose="eval",
                    prompt=PromptIndex(index),
                    member=Member(0),
                ),
                sampling=sampling(spec, "eval"),
                max_new_tokens=min(spec.rollout.max_new_tokens, context - len(prompt)),
                stop_tokens=tokenizer.stop_tokens(),
                stop_strings=tuple(spec.rollout.stop),
            )
        )
    engine.submit(requests)
    done: list[Completion] = []
    while engine.running:
        done += engine.step()
    engine.close()
    return sorted(done, key=lambda completion: completion.id)


async def _score(spec: JobSpec, texts: list[str], table: "list[dict[str, object]]") -> list[float]:
    judge = RewardSandbox(spec.reward, Path("/dev/null"))
    try:
        await judge.start()
        key = spec.data.answer_key
        return [
            (await judge.score(text, None if key is None else row[key], row)).reward
            for text, row in zip(texts, table, strict=True)
        ]
    finally:
        judge.stop()
