"""Call TRL's own losses and advantages, without a model; runs in the peers' environment."""

import math
from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peer_source import run_statements
from benchmarks.peer_tensors import Padded

_grpo: Any = import_module("trl.trainer.grpo_trainer")
_rloo: Any = import_module("trl.trainer.rloo_trainer")
_trl: Any = import_module("trl")
_rewards: Any = import_module("trl.rewards")


def grpo_loss(padded: Padded, mismatch: bool, **settings: Any) -> Tensor:
    """Compute the loss of advantages that are given."""
    trainer = _trainer(_trl.GRPOConfig, settings)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = mismatch
    inputs = _batch(padded) | {
        "old_per_token_logps": padded.old,
        "ref_per_token_logps": padded.reference,
        "num_items_in_batch": padded.mask.sum(),
    }
    if mismatch:
        inputs["importance_sampling_ratio"] = _importance(trainer, padded)
    return _loss(_grpo.GRPOTrainer, trainer, padded, inputs)


def rloo_loss(padded: Padded, mismatch: bool, **settings: Any) -> Tensor:
    trainer = _trainer(_trl.RLOOConfig, settings)
    inputs = _batch(padded) | {
        "old_logps": (padded.old * padded.mask).sum(1),
        "advantages": _rloo_advantages(trainer, padded),
    }
    return _loss(_rloo.RLOOTrainer, trainer, padded, inputs)


def rloo_advantages(padded: Padded, mismatch: bool, **settings: Any) -> list[float]:
    trainer = _trainer(_trl.RLOOConfig, settings)
    return padded.values(_rloo_advantages(trainer, padded)[:, None])


def grpo_advantages(padded: Padded, mismatch: bool, **settings: Any) -> list[float]:
    trainer = _trainer(_trl.GRPOConfig, settings)
    names = run_statements(
        _grpo.GRPOTrainer._generate_and_score_completions,
        "if self.multi_objective_aggregation ==",
        "advantages = torch.nan_to_num",
        {
            **vars(_grpo),
            "self": trainer,
            "rewards_per_func": padded.rewards[:, None],
            "unscorable_mask": torch.zeros(len(padded.rewards), dtype=torch.bool),
            "num_generations": padded.inputs.group_size,
            "device": "cpu",
        },
    )
    return padded.values(names["advantages"][:, None])


def overlong(padded: Padded, mismatch: bool, limit: int, last: int) -> list[float]:
    penalise = _rewards.get_soft_overlong_punishment(limit, last)
    return penalise([[0] * length for length in padded.inputs.lengths])


CALLS = {
    call.__name__: call
    for call in (grpo_loss, rloo_loss, rloo_advantages, grpo_advantages, overlong)
}


def _trainer(config: Any, settings: dict[str, Any]) -> SimpleNamespace:
    """Return what a trainer's methods read: its settings, and one process without a model."""
    args = config(
        output_dir="unused", use_cpu=True, bf16=False, gradient_accumulation_steps=1, **settings
    )
    names = ("beta", "loss_type", "entropy_coef", "normalize_advantages", "scale_rewards")
    names += ("importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold")
    names += ("max_completion_length", "use_adaptive_entropy", "multi_objective_aggregation")
    names += ("vllm_importance_sampling_mode",)
    names += ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max")
    return SimpleNamespace(
        **{name: getattr(args, name) for name in names if hasattr(args, name)},
        args=args,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        reward_weights=torch.ones(1),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=getattr(args, "entropy_coef", 0.0) != 0.0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=_unchanged,
            gather_for_metrics=_unchanged,
            reduce=_unchanged,
        ),
    )


def _loss(owner: Any, trainer: SimpleNamespace, padded: Padded, inputs: dict[str, Any]) -> Tensor:
    def score(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return padded.current, padded.entropy, None

    trainer._get_per_token_logps_and_entropies = score
    return owner._compute_loss(trainer, None, inputs)


def _unchanged(value: Tensor, reduction: str = "sum") -> Tensor:
    return value


def _batch(padded: Padded) -> dict[str, Any]:
    """Return the answers behind empty prompts; log-probs aren't computed from them."""
    empty = torch.zeros(len(padded.mask), 0)
    return {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros_like(padded.mask),
        "completion_mask": padded.mask,
        "advantages": padded.advantages,
    }


def _importance(trainer: SimpleNamespace, padded: Padded) -> Tensor:
    names = run_statements(
        _grpo.GRPOTrainer._generate_and_score_completions,
        "mask = completion_mask if tool_mask is None",
        "if self.vllm_importance_sampling_mode in",
        {
            "torch": torch,
            "math": math,
            "self": trainer,
            "completion_mask": padded.mask,
            "tool_mask": None,
            "old_per_token_logps": padded.old,
            "sampling_per_token_logps": padded.sampler,
        },
    )
    return names["vllm_importance_sampling_ratio"]


def _rloo_advantages(trainer: SimpleNamespace, padded: Padded) -> Tensor:
    names = run_statements(
        _rloo.RLOOTrainer._generate_and_score_completions,
        "if self.beta != 0.0:\n    per_token_kl",
        "advantages = torch.nan_to_num",
        {
            **vars(_rloo),
            "self": trainer,
            "gather": _unchanged,
            "rewards": padded.rewards,
            "num_generations": padded.inputs.group_size,
            "old_per_token_logps": padded.old,
            "ref_per_token_logps": padded.reference,
            "completion_mask": padded.mask,
        },
    )
    return names["advantages"]
