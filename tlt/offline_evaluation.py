"""Score a policy on a spec's held-out data in this process, without a session."""

import asyncio
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
from tlt.rewards.reward_process_client import RewardSandbox


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


async def _score(
    spec: JobSpec, completions: list[Completion], table: list[dict[str, Any]]
) -> list[float]:
    judge = RewardSandbox(spec.reward, Path("/dev/null"))
    try:
        await judge.start()
        key = spec.data.answer_key
        rewards: list[float] = []
        for done, row in zip(completions, table, strict=True):
            answer = None if key is None else row[key]
            known = {
                "tokens": lambda done=done: done.tokens,
                "length": lambda done=done: len(done.tokens),
                "stop": lambda done=done: done.stop,
            }
            rewards.append((await judge.score(done.text, answer, row, known)).reward)
        return rewards
    finally:
        judge.stop()
