"""The sections of a spec that say what is learned: data and algorithm.

The comment above a field describes it in docs/spec.md, which docs/generate.py writes.
"""

import math
import re
from pathlib import PurePath
from typing import Any, Literal

import msgspec

from tlt.spec.section import Section, require

HUB = "hf://"
GYM = "reasoning_gym:"
# the tasks of an environment of kind verifiers
TASKSET = "taskset:"
# the name of a set that has none
ONE_SET = "eval"
# losses and advantages that are built in
LOSSES = ("clipped", "gspo", "cispo", "sapo", "rloo")
ADVANTAGES = ("group", "leave_one_out", "batch", "group_batch")
# names of sets appear in metrics and commands
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class EvaluationSet(Section, frozen=True, kw_only=True):
    """Name held-out prompts, and say how they are answered; the rest is as `data` says."""

    # Prompts, as of `data.train`.
    path: str
    # Answers to each prompt: the scores are avg@k, pass@k and maj@k of them.
    answers: int = 1
    # Evaluate on this many rows at most; `data.eval_limit` if absent.
    limit: int | None = None
    # Column of the prompt; `data.prompt_key` if absent.
    prompt_key: str | None = None
    # Column of the answer; `data.answer_key` if absent.
    answer_key: str | None = None
    # Column that names a row's source; `data.source_key` if absent.
    source_key: str | None = None
    # Sampling temperature, 0 is greedy; `rollout.eval_temperature` if absent.
    temperature: float | None = None
    # Sample from the k most likely tokens, 0 for all; `rollout.eval_top_k` if absent.
    top_k: int | None = None
    # Sample from the most likely tokens that hold this much; `rollout.eval_top_p` if absent.
    top_p: float | None = None
    # Leave out tokens below this share of the highest probability; `rollout.eval_min_p` if absent.
    min_p: float | None = None
    # Most tokens of an answer; `rollout.max_new_tokens` if absent.
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        require(self.answers >= 1, "answers must be at least 1")
        require(self.limit is None or self.limit > 0, "limit must be above 0")
        require(
            self.temperature is None or self.temperature >= 0,
            "temperature must be 0 (greedy) or more",
        )
        require(self.top_k is None or self.top_k >= 0, "top_k must be 0 (off) or more")
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p must lie in (0, 1]")
        require(self.min_p is None or 0 <= self.min_p < 1, "min_p must lie in [0, 1)")
        require(
            self.max_new_tokens is None or self.max_new_tokens >= 1,
            "max_new_tokens must be at least 1",
        )


class SourceSpec(Section, frozen=True, kw_only=True):
    """Name one of several sources of training prompts."""

    # File or folder, data set of the hub or task of reasoning-gym, as of `data.train`.
    path: str
    # Share of the prompts, relative to the weights of the other sources.
    weight: float = 1.0
    # Name in metrics and in the column `source`; that of the file or folder if absent.
    name: str | None = None
    # Column of the prompt in this source; `data.prompt_key` if absent.
    prompt_key: str | None = None
    # Column of the answer in this source; `data.answer_key` if absent.
    answer_key: str | None = None
    # Column that names a row's own source; `data.source_key` if absent.
    source_key: str | None = None

    def __post_init__(self) -> None:
        require(self.name is None or self.name != "", "name must not be empty")
        require(0 < self.weight < math.inf, "weight must be above 0 and finite")

    @property
    def label(self) -> str:
        if self.name is not None or names_file(self.path):
            return self.name or PurePath(self.path).stem
        if self.path.startswith(TASKSET):
            return TASKSET.rstrip(":")
        return PurePath(self.path.removeprefix(HUB).removeprefix(GYM).partition("?")[0]).stem


class DataSpec(Section, frozen=True, kw_only=True):
    """Name the prompts to train on and to evaluate with."""

    # JSONL, parquet or Arrow file of training prompts, a folder of them, a data set of the hub
    # (`hf://openai/gsm8k?config=main&split=train`), a task of reasoning-gym
    # (`reasoning_gym:chain_sum?max_terms=2&seed=1`) or tasks of `environment.taskset`
    # (`taskset:0:1000`, `taskset:?split=test`); or a list of sources to mix.
    train: str | tuple[SourceSpec, ...]
    # Held-out prompts, needed for evaluations: named as those of `train`, or several sets by name.
    eval: str | dict[str, EvaluationSet] | None = None
    # Column of the prompt: a text, or with `chat_template` a list of messages. Nested columns have
    # dots, here and in the other keys: `extra_info.question`.
    prompt_key: str = "prompt"
    # Column of the answer that the reward compares with; null if there is none.
    answer_key: str | None = "answer"
    # Column that names a row's source where a file mixes several, for `reward.sources` and metrics.
    source_key: str | None = None
    # Format each prompt with the tokenizer's chat template.
    chat_template: bool = False
    # System message put before each prompt by the chat template.
    system_prompt: str | None = None
    # Variables of the chat template, such as `{enable_thinking: false}`.
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    # Column of the tools that the chat template offers.
    tools_key: str | None = None
    # Evaluate on this many rows at most.
    eval_limit: int | None = None
    # Column that orders the training prompts, lowest value first; shuffled anew in each epoch if
    # absent.
    order_by: str | None = None
    # Epochs in which a prompt is skipped after all of its answers were right (`reward.correct_at`).
    skip_solved_epochs: int = 0
    # Most tokens of a prompt; the context less one token if absent.
    max_prompt_tokens: int | None = None
    # Leave rows out whose prompt is longer, or refuse the job.
    long_prompts: Literal["skip", "refuse"] = "skip"

    def __post_init__(self) -> None:
        most = self.max_prompt_tokens
        require(
            self.chat_template or not (self.chat_template_kwargs or self.tools_key),
            "chat_template_kwargs and tools_key need chat_template: true",
        )
        labels = [source.label for source in self.sources]
        require(len(labels) > 0, "train: the list is empty")
        twice = next((label for label in labels if labels.count(label) > 1), None)
        require(twice is None, f"train: the source '{twice}' is there twice: give them a name each")
        require(self.skip_solved_epochs >= 0, "skip_solved_epochs must be 0 or more")
        require(self.eval_limit is None or self.eval_limit > 0, "eval_limit must be above 0")
        require(most is None or most > 0, "max_prompt_tokens must be above 0")
        require(self.eval != {}, "eval names no set")
        for name in self.evaluation_sets:
            require(
                _SET_NAME.fullmatch(name) is not None,
                f"eval: the name of a set may hold letters, digits, '-', '_' and '.': {name!r}",
            )

    @property
    def evaluation_sets(self) -> dict[str, EvaluationSet]:
        """Return the held-out sets by name; a path alone is a set with the name `eval`."""
        if isinstance(self.eval, dict):
            return self.eval
        return {} if self.eval is None else {ONE_SET: EvaluationSet(path=self.eval)}

    @property
    def mixed(self) -> bool:
        return not isinstance(self.train, str)

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """Return what the training prompts come from: one source unless they are mixed."""
        return (SourceSpec(path=self.train),) if isinstance(self.train, str) else self.train

    def most_prompt_tokens(self, context: int) -> int:
        """Return how long a prompt may be: a token of the context is left for the answer."""
        return min(context - 1, self.max_prompt_tokens or context)


class AlgorithmSpec(Section, frozen=True, kw_only=True):
    """Set the GRPO update."""

    # Algorithm.
    name: Literal["grpo"] = "grpo"
    # Number of policy updates, those of a job that it starts from included; 0 only evaluates.
    steps: int
    # Groups in a rollout batch.
    prompts_per_step: int
    # Answers to each prompt.
    group_size: int
    # Highest learning rate.
    learning_rate: float = 1e-6
    # Steps in which the learning rate rises to its highest.
    warmup_steps: int = 0
    # Course of the learning rate after the warm-up.
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    # Optimiser steps in each pass over a batch. With one step in all no ratio is clipped, because
    # each is 1 before the policy has changed.
    minibatches: int = 1
    # Passes over a batch.
    epochs: int = 1
    # Most tokens of a forward and backward pass; `auto` is what is fast on the device, or what its
    # memory holds of that.
    microbatch_tokens: Literal["auto"] | int = "auto"
    # With 1, workers that idle decode the next step's prompts. All answers of a step then have the
    # weights that were the newest when the step before it began, and are one version behind.
    staleness: Literal[0, 1] = 0
    # Values of the keys below that belong together; those that the spec sets itself stay.
    preset: str | None = None
    # Loss of a token: PPO's and GRPO's (`clipped`), another paper's (`gspo`, `cispo`, `sapo`,
    # `rloo`), or a function of yours, as `package.module:name` or `file.py:name`.
    loss: str = "clipped"
    # What an answer's reward is compared with: its group (`group`), the others in it
    # (`leave_one_out`), all tokens (`batch`), or both (`group_batch`); or a function of yours.
    advantage: str = "group"
    # The probability ratio is clipped below 1 - `clip_low`.
    clip_low: float = 0.2
    # The probability ratio is clipped above 1 + `clip_high`.
    clip_high: float = 0.28
    # Highest ratio that counts against an answer with a negative advantage.
    dual_clip: float = 3.0
    # Weight of the penalty for moving away from the initial policy; 0 for none.
    kl_coefficient: float = 0.0
    # Add the penalty to the loss, or take it from the rewards before they are compared.
    kl_in: Literal["loss", "reward"] = "loss"
    # Weight of the bonus for the entropy of the policy's tokens; 0 for none.
    entropy_coefficient: float = 0.0
    # Give every token or every answer the same weight, or divide by answers of constant length.
    averaging: Literal["token", "sequence", "constant"] = "token"
    # The constant length.
    averaged_tokens: int | None = None
    # Compare answers that were cut off with the others, but don't learn from them.
    mask_truncated: bool = False
    # Last tokens before `rollout.max_new_tokens`, or the end of the context if that comes first, in
    # which the reward of training answers falls.
    overlong_tokens: int = 0
    # By how much it has fallen at the limit.
    overlong_penalty: float = 1.0
    # Replace groups whose answers all have the same reward, before that fall, by further prompts,
    # and leave them out of the update (DAPO).
    dynamic_sampling: bool = False
    # Most prompts of a step with dynamic sampling, in multiples of `prompts_per_step` (verl's
    # `filter_groups`); then the update is made with the groups that differ so far.
    max_num_gen_batches: float = 3.0
    # Divide advantages by the standard deviation of their group or batch.
    normalise_advantage: bool = True
    # What is done where the sampler's and the learner's probabilities differ too much: truncate the
    # weight of a token or of an answer, or leave it out. A token's weight is the ratio of the two
    # probabilities, and an answer's the product of its tokens' weights. `geometric_mask` truncates
    # tokens' weights and leaves out answers by the mean of them.
    importance: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = "token_truncate"
    # Highest weight.
    importance_cap: float = 2.0
    # Lowest weight that a mask keeps.
    importance_floor: float = 0.0
    # Lowest and highest geometric mean of an answer's weights that `geometric_mask` keeps.
    geometric_bounds: tuple[float, float] = (0.999, 1.001)
    # Highest norm of the gradient.
    gradient_clip: float = 1.0
    # AdamW's weight decay.
    weight_decay: float = 0.0
    # AdamW's two decay rates.
    betas: tuple[float, float] = (0.9, 0.95)
    # Number format of the update; `auto` measures which is faster and accurate enough, and with
    # shards takes bfloat16 on a GPU.
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    # Kernel of the update's attention; `auto` measures which is fastest, and with shards takes
    # `flash` on a GPU in bfloat16.
    attention: Literal["auto", "padded", "packed", "native", "flash"] = "auto"
    # Compile the layers; `auto` does so where the job is long enough to gain.
    compile: bool | Literal["auto"] = "auto"
    # `auto` takes the sampler's log-probs where they equal the learner's.
    old_logprobs: Literal["auto", "learner"] = "auto"
    # Ranks that split one copy of weights, gradients and optimiser (FSDP2); more if none divides.
    shards: int | Literal["all"] = 1
    # Recompute activations in the backward pass to save memory; `auto` from 1e9 weights on. With
    # `offload` a GPU's host keeps what they are computed from, for contexts of 16k tokens and more.
    gradient_checkpointing: bool | Literal["auto", "offload"] = "auto"
    # Allow training on samples drawn with `top_k`, `top_p` or `min_p`.
    allow_filtered_sampling: bool = False
    # Steps between checkpoints.
    checkpoint_every: int = 10
    # Steps between evaluations; 0 for none.
    eval_every: int = 0
    # Keep the policy that did best in an evaluation, by the mean over sets of each one's mean
    # reward.
    keep_best: bool = True
    # One-sided confidence with which a policy has to be better than the best so far to take its
    # place, prompt by prompt; at 0.5 it only has to score higher.
    keep_best_confidence: float = 0.5
    # Keep every checkpoint and every best policy, not only the newest.
    keep_all: bool = False
    # A rank that waits longer for the others fails the update.
    collective_timeout_seconds: float = 300.0

    @property
    def answers_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def chosen_microbatch_tokens(self) -> int:
        """Return the size of a pass, in a spec in which it is chosen."""
        assert self.microbatch_tokens != "auto", "a rank chooses it when it opens the job"
        return self.microbatch_tokens

    def __post_init__(self) -> None:
        require(self.steps >= 0, "steps must be 0 (only evaluate) or more")
        require(self.prompts_per_step >= 1, "prompts_per_step must be at least 1")
        require(self.group_size >= 2, "group_size must be at least 2: answers are compared")
        require(self.learning_rate > 0, "learning_rate must be above 0")
        require(self.minibatches >= 1, "minibatches must be at least 1")
        require(self.epochs >= 1, "epochs must be at least 1")
        _require_known("loss", self.loss, LOSSES)
        _require_known("advantage", self.advantage, ADVANTAGES)
        require(self.checkpoint_every >= 1, "checkpoint_every must be at least 1")
        require(self.eval_every >= 0, "eval_every must be 0 (never) or more")
        require(0.5 <= self.keep_best_confidence < 1, "keep_best_confidence must lie in [0.5, 1)")
        require(self.steps > 0 or self.eval_every > 0, "steps 0 only evaluates: set eval_every: 1")
        require(self.importance_cap >= 1, "importance_cap must be at least 1")
        require(0 <= self.importance_floor < 1, "importance_floor must lie in [0, 1)")
        low, high = self.geometric_bounds
        require(0 <= low < 1 < high, "geometric_bounds must be a bound below 1 and one above")
        require(
            self.microbatch_tokens == "auto" or self.microbatch_tokens >= 1,
            "microbatch_tokens must be at least 1, or auto",
        )
        require(self.kl_coefficient >= 0, "kl_coefficient must be 0 or more")
        require(self.entropy_coefficient >= 0, "entropy_coefficient must be 0 or more")
        require(self.warmup_steps >= 0, "warmup_steps must be 0 or more")
        require(self.weight_decay >= 0, "weight_decay must be 0 or more")
        require(all(0 <= beta < 1 for beta in self.betas), "betas must lie in [0, 1)")
        require(0 < self.clip_low < 1, "clip_low must lie between 0 and 1")
        require(self.clip_high > 0, "clip_high must be above 0")
        require(self.max_num_gen_batches >= 1, "max_num_gen_batches must be at least 1")
        require(self.dual_clip > 1, "dual_clip must be above 1")
        require(
            (self.averaging == "constant") == (self.averaged_tokens is not None),
            "averaging constant goes with averaged_tokens",
        )
        tokens = self.averaged_tokens
        require(tokens is None or tokens > 0, "averaged_tokens must be above 0")
        require(
            self.loss not in ("gspo", "rloo") or self.averaging == "sequence",
            f"loss {self.loss} has one ratio for an answer: it needs averaging sequence",
        )
        require(
            not (self.mask_truncated and self.advantages_in_update),
            "mask_truncated leaves answers out that kl_in: reward or an advantage function of "
            "yours would have to compare",
        )
        require(self.shards == "all" or self.shards > 0, "shards must be at least 1, or all")
        require(self.gradient_clip > 0, "gradient_clip must be above 0")
        require(self.overlong_tokens >= 0, "overlong_tokens must be 0 or more")
        require(math.isfinite(self.overlong_penalty), "overlong_penalty must be a finite number")
        require(self.collective_timeout_seconds > 0, "collective_timeout_seconds must be above 0")

    @property
    def advantages_in_update(self) -> bool:
        """Return True if advantages need log-probs or a user's function, which only ranks have."""
        return self.penalises_rewards or is_own_function(self.advantage)

    @property
    def penalises_rewards(self) -> bool:
        return self.kl_in == "reward" and self.kl_coefficient > 0

    @property
    def learns_without_advantage(self) -> bool:
        """Return True if an answer may count even where all of its group have the same reward."""
        own = is_own_function(self.advantage)
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0 or own

    @property
    def clips_nothing(self) -> bool:
        """Return True if a spec asks for a clipped or weighted ratio, and each ratio will be 1."""
        bounds = ("clip_low", "clip_high", "dual_clip")
        named = self.preset is not None or self.loss != "clipped"
        asked = named or any(getattr(self, key) != _default(key) for key in bounds)
        own = self.loss == "rloo" or is_own_function(self.loss)
        return asked and not own and self.minibatches * self.epochs == 1


def names_file(source: str) -> bool:
    """Return True if a source of prompts is a file or folder."""
    return not source.startswith((HUB, GYM, TASKSET))


def is_own_function(name: str) -> bool:
    """Return True for `package.module:name` and `file.py:name`."""
    return ":" in name


def _require_known(key: str, name: str, known: tuple[str, ...]) -> None:
    require(
        is_own_function(name) or name in known,
        f"{key}: no {key} '{name}': {', '.join(known)}, or file.py:function",
    )


def _default(key: str) -> object:
    return {field.name: field.default for field in msgspec.structs.fields(AlgorithmSpec)}[key]
