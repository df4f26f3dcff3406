"""Call verl's own rewards, advantages and losses, as its trainer does, without Ray or a model.

It runs in the peers' environment.
"""

import typing
from collections import Counter, defaultdict
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.peer_source import load_function
from benchmarks.peer_tensors import Padded

_core: Any = import_module("verl.trainer.ppo.core_algos")
_losses: Any = import_module("verl.workers.utils.losses")
_correction: Any = import_module("verl.trainer.ppo.rollout_corr_helper")
_functional: Any = import_module("verl.utils.torch_functional")
_algorithm: Any = import_module("verl.trainer.config.algorithm")
_actor: Any = import_module("verl.workers.config.actor")
_rewards: Any = import_module("verl.workers.reward_manager.dapo")
_data: Any = import_module("verl.protocol").DataProto
_dicts: Any = import_module("tensordict").TensorDict

_names = {
    "DataProto": _data,
    "core_algos": _core,
    "masked_mean": _functional.masked_mean,
    "torch": torch,
    "Optional": typing.Optional,
    "AdvantageEstimator": _core.AdvantageEstimator,
    "AlgoConfig": _algorithm.AlgoConfig,
}
_apply_kl_penalty = load_function("verl.trainer.ppo.ray_trainer", "apply_kl_penalty", _names)
_compute_advantage = load_function("verl.trainer.ppo.ray_trainer", "compute_advantage", _names)


def policy_loss(
    padded: Padded,
    mismatch: bool,
    algorithm: dict[str, Any],
    actor: dict[str, Any],
    correction: dict[str, Any] | None = None,
) -> Tensor:
    """Compute the loss of rewards; `correction` is verl's `rollout_correction`."""
    batch = _batch_with_advantages(padded, algorithm, correction or {})
    config = _actor_config(actor)
    mask = batch.batch["response_mask"]
    fields = {
        "response_mask": mask,
        "old_log_probs": padded.old,
        "ref_log_prob": padded.reference,
        "advantages": batch.batch["advantages"],
    }
    if "rollout_is_weights" in batch.batch:
        fields["rollout_is_weights"] = batch.batch["rollout_is_weights"]
    data = _dicts(fields, batch_size=[len(mask)])
    totals = {"dp_size": 1, "batch_num_tokens": mask.sum().item(), "global_batch_size": len(mask)}
    for name, value in totals.items():
        data.set_non_tensor(name, value)
    output = {"log_probs": padded.current, "entropy": padded.entropy}
    with patch.object(_losses, "no_padding_2_padding", lambda values, data: values):
        return _losses.ppo_loss(config, output, data)[0]


def advantages(padded: Padded, mismatch: bool, **algorithm: Any) -> list[float]:
    batch = _batch_with_advantages(padded, algorithm, {})
    return padded.values(batch.batch["advantages"])


def overlong(padded: Padded, mismatch: bool, limit: int, last: int) -> list[float]:
    """Return the penalty alone: all rewards are 0 before it."""
    manager = _rewards.DAPORewardManager(
        tokenizer=SimpleNamespace(decode=lambda *_, **__: "", eos_token="end"),
        num_examine=0,
        compute_score=lambda **_: 0.0,
        max_resp_len=limit,
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=last, penalty_factor=1.0, log=False),
    )
    count = len(padded.mask)
    prompt = torch.ones(count, 1, dtype=torch.long)
    data = _data.from_dict(
        tensors={
            "prompts": prompt,
            "responses": torch.zeros_like(padded.mask),
            "attention_mask": torch.cat([prompt, padded.mask.long()], dim=1),
        },
        non_tensors={
            "data_source": np.array(["none"] * count, dtype=object),
            "reward_model": np.array([{"ground_truth": ""}] * count, dtype=object),
        },
    )
    return manager(data).sum(1).tolist()


def filtered_groups(padded: Padded, mismatch: bool) -> list[float]:
    """Return 1 for each group that dynamic sampling replaces."""
    size = padded.inputs.group_size
    rewards = {f"{i // size}_{i % size}": r[None] for i, r in enumerate(padded.rewards)}
    store = SimpleNamespace(
        kv_batch_get=lambda keys, **_: {"rm_scores": [rewards[key] for key in keys]}
    )
    names: dict[str, Any] = {
        "tq": store,
        "np": np,
        "Counter": Counter,
        "defaultdict": defaultdict,
        "FILTER_GROUPS_REWARD_METRIC": "reward",
    }
    find = load_function("verl.trainer.ppo.v1.replay_buffer", "_dapo_filtered_keys", names)
    buffer = SimpleNamespace(
        filter_groups_metric="reward",
        finished_keys={"train": {key.split("_")[0] for key in rewards}},
        partitions={"train": rewards},
        _dapo_classification_cache=defaultdict(dict),
    )
    found, _ = find(buffer, "train")
    return [float(str(group) in found) for group in range(padded.inputs.groups)]


CALLS = {call.__name__: call for call in (policy_loss, advantages, overlong, filtered_groups)}


def _batch_with_advantages(
    padded: Padded, algorithm: dict[str, Any], correction: dict[str, Any]
) -> Any:
    """Take verl's trainer's steps from scores to advantages, in its order."""
    settings = dict(algorithm)
    penalty = _core.FixedKLController(settings.pop("kl_coef", 0.0))
    config = _algorithm.AlgoConfig(**settings)
    batch = _scored(padded)
    if config.use_kl_in_reward:
        batch, _ = _apply_kl_penalty(batch, penalty, kl_penalty=config.kl_penalty)
    if correction:
        made = _algorithm.RolloutCorrectionConfig(**{"rollout_is": None} | correction)
        batch, _ = _correction.compute_rollout_correction_and_add_to_batch(batch, made)
    return _compute_advantage(
        batch,
        adv_estimator=config.adv_estimator,
        gamma=config.gamma,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
        config=config,
    )


def _scored(padded: Padded) -> Any:
    """Return the answers; an answer's score is that of its last token."""
    scores = torch.zeros_like(padded.mask)
    ends = torch.tensor(padded.inputs.lengths) - 1
    scores[torch.arange(len(ends)), ends] = padded.rewards
    size = padded.inputs.group_size
    return _data.from_dict(
        tensors={
            "response_mask": padded.mask.clone(),
            "token_level_scores": scores,
            "token_level_rewards": scores.clone(),
            "old_log_probs": padded.old,
            "ref_log_prob": padded.reference,
            "rollout_log_probs": padded.sampler,
        },
        non_tensors={"uid": np.array([i // size for i in range(len(ends))], dtype=object)},
    )


def _actor_config(settings: dict[str, Any]) -> Any:
    mode = settings.get("loss_mode", "vanilla")
    rest = {key: value for key, value in settings.items() if key != "loss_mode"}
    return _actor.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=_actor.PolicyLossConfig(loss_mode=mode),
        **rest,
    )
