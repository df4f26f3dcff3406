"""Run a foreign workload as whole jobs: its policy in a folder, with a tokenizer and a task.

Some of the vocabulary ends an answer, as many tokens as give about the workload's mean length. The
task rewards answers with an odd number of characters, which a policy hardly learns in a few steps.
"""

import json
import math
import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.foreign_workloads import RandomPolicy, Requests, Workload, make_policy
from benchmarks.random_policy import COIN
from benchmarks.stacks import run, session
from tlt.models.decoder_spec import Decoder

_FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_WORKERS, _GROUP = 2, 8
_PROMPTS = 128
_SAMPLED_LENGTHS = 400
# tokens of an answer; the rest of the context is for its prompt
_LONGEST = 900
# of a job without speculation, roughly
_SECONDS = 10.0
_LEAST_STEPS, _MOST_STEPS = 4, 30
_PRINTABLE = [chr(code) for code in range(ord("!"), ord("~") + 1)]


@contextmanager
def job_session() -> Generator[None]:
    with session(workers=_WORKERS):
        yield


def off_over_tlt(
    workload: Workload, folder: Path, seed: int, engine: str = "native", seconds: float = _SECONDS
) -> float:
    """Return the seconds of jobs without speculation over those that a user gets by default.

    There are two of each in ABBA order, because the machine's speed drifts. A job without
    speculation takes about `seconds`.
    """
    spec = write_job(workload, folder, seed, engine)
    first = run("off", seed, "algorithm.steps=2", spec=spec)
    a_step = min(step.whole for step in first.steps)
    steps = max(_LEAST_STEPS, min(_MOST_STEPS, round(seconds / a_step)))
    length = f"algorithm.steps={steps}"
    taken = {"off": 0.0, "cold": 0.0}
    for stack in ("off", "cold", "cold", "off"):
        job = run(stack, seed, length, spec=spec)
        taken[stack] += math.fsum(step.whole for step in job.steps)
    return taken["off"] / taken["cold"]


def write_job(workload: Workload, folder: Path, seed: int, engine: str = "native") -> Path:
    """Write a job's spec with all that it names.

    With SGLang most answers have the mean length, because it draws other tokens each time.
    """
    policy = workload.policy
    if isinstance(policy, Path):
        return policy / "job.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(seed)
    mean = fmean(workload.lengths(dice) for _ in range(_SAMPLED_LENGTHS))
    varies = engine == "native"
    most = min(round(4 * mean), _LONGEST) if varies else round(mean)
    ends = max(1, round(policy.vocabulary / mean)) if varies else 1
    _write_policy(policy, make_policy(workload, seed), folder / "policy", ends)
    (folder / "coin.py").write_text(COIN)
    prompts = [request.prompt for request in Requests(workload, seed).block(0, _GROUP * _PROMPTS)]
    rows = [
        {"prompt": _text(prompt, policy.vocabulary), "answer": ""} for prompt in prompts[::_GROUP]
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec: dict[str, Any] = {
        "name": "foreign",
        "policy": {"path": "policy"},
        "data": {"train": "data.jsonl"},
        "reward": {"kind": "function", "function": "coin.py:coin"},
        "algorithm": {
            "steps": _LEAST_STEPS,
            "prompts_per_step": max(2, math.ceil(_WORKERS * workload.rows / _GROUP)),
            "group_size": _GROUP,
            "learning_rate": 1e-6,
            "checkpoint_every": 1000,
        },
        "rollout": {"engine": engine, "max_new_tokens": most, "slots": workload.rows},
    }
    path = folder / "job.json"
    path.write_text(json.dumps(spec))
    return path


def _write_policy(policy: RandomPolicy, made: Decoder, folder: Path, ends: int) -> None:
    """Write the policy and its tokenizer; its first `ends` tokens end an answer."""
    transformers_policy(policy, made).save_pretrained(folder)
    stops = {"eos_token_id": list(range(ends))}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    _write_tokenizer(folder, made.config.vocabulary)


def transformers_policy(policy: RandomPolicy, made: Decoder) -> PreTrainedModel:
    config = made.config
    kinds, model_class = _FAMILIES[policy.family]
    own = kinds(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    model: PreTrainedModel = model_class(own)
    model.load_state_dict(made.weights)
    return model.eval()


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with a token for each printable character, and words besides."""
    rest = sorted(set(ByteLevel.alphabet()) - set(_PRINTABLE))
    words = [*_PRINTABLE, *rest, *(f"w{number}" for number in range(vocabulary))][:vocabulary]
    tokenizer = Tokenizer(BPE({word: token for token, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _text(tokens: Sequence[int], vocabulary: int) -> str:
    characters = _PRINTABLE[:vocabulary]
    return "".join(characters[token % len(characters)] for token in tokens)
