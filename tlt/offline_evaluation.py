"""Score a policy on a spec's held-out data in this process, without a session."""

import asyncio
import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tlt.config import JobSpec
from tlt.dataset import rows
from tlt.engine.base import Completion, NoiseKey, Request
from tlt.engine.native import NativeEngine
from tlt.id_types import Member, PolicyVersion, PromptIndex, Step
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.tokenizer import Tokenizer
from tlt.ranks.engine_requirements import engine_dtype
from tlt.ranks.rollout import sampling
from tlt.rewards.weighted_rewards import Verdict, WeightedRewards


def held_out_rewards(spec: JobSpec, model: str) -> list[float]:
    """Answer the held-out prompts with the policy in the folder `model`; return the rewards."""
    assert spec.data.eval is not None
    table = [row for _, row in islice(rows(Path(spec.data.eval), spec.data), spec.data.eval_limit)]
    completions = _decode(spec, model, table)
    return asyncio.run(_score(spec, completions, table))


def _decode(spec: JobSpec, model: str, table: list[dict[str, Any]]) -> list[Completion]:
    torch.set_num_threads(1)
    tokenizer = Tokenizer(model)
    policy = load_decoder(Path(model), engine_dtype(spec, torch.device("cpu")))
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
            row[spec.data.prompt_key],
            spec.data,
            f"data.eval, row {index + 1}",
            None if spec.data.tools_key is None else row.get(spec.data.tools_key),
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


async def _score(
    spec: JobSpec, completions: list[Completion], table: list[dict[str, Any]]
) -> list[float]:
    """Return the rewards of the answers that have one."""
    rewards, key = WeightedRewards(spec.rewards, Path(os.devnull)), spec.data.answer_key

    async def judge(done: Completion, row: dict[str, Any]) -> Verdict:
        known = {
            "tokens": lambda: done.tokens,
            "length": lambda: len(done.tokens),
            "stop": lambda: done.stop,
        }
        return await rewards.score(done.text, None if key is None else row[key], row, known)

    try:
        await rewards.start()
        verdicts = await asyncio.gather(*map(judge, completions, table))
        return [verdict.reward for verdict in verdicts if verdict.reward is not None]
    finally:
        await rewards.stop()
