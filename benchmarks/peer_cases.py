"""List what is compared with TRL and verl: presets, corrections of the sampler, advantages.

The peers' environment imports this module, too, so it needs nothing but Python.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peer_inputs import LIMIT


@dataclass(frozen=True)
class Case:
    """`ours` sets keys of the spec's `algorithm`; `theirs` is for the peer's function `call`."""

    name: str
    peer: str
    call: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # the sampler's log-probs differ from the learner's
    mismatch: bool = False
    # the relative difference that is allowed, and why it is more than rounding
    tolerance: float = 1e-5
    reason: str = ""

    @property
    def key(self) -> str:
        return f"{self.name}.{self.peer}"


def _trl(name: str, ours: Mapping[str, Any], mismatch: bool = False, **theirs: Any) -> Case:
    """Return a case of GRPOTrainer with a dual clip and the paper's KL; its defaults are others."""
    settings: dict[str, Any] = {
        "loss_type": "dapo",
        "beta": 0.0,
        "use_bias_correction_kl": False,
        "epsilon": 0.2,
        "delta": 3.0,
    }
    return Case(name, "trl", "grpo_loss", ours, settings | theirs, mismatch)


def _trl_importance(mode: str, **ours: Any) -> Case:
    theirs = {"loss_type": "grpo", "beta": 0.04, "vllm_importance_sampling_mode": mode}
    made = {"preset": "grpo", "importance": mode, "importance_cap": 3.0, **ours}
    return _trl(f"importance_{mode}", made, True, **theirs)


def _rloo(name: str, beta: float, **ours: Any) -> Case:
    return Case(name, "trl", "rloo_loss", {"preset": "rloo", **ours}, {"beta": beta})


def _verl(
    name: str,
    ours: Mapping[str, Any],
    algorithm: Mapping[str, Any],
    correction: Mapping[str, Any] | None = None,
    **actor: Any,
) -> Case:
    """Return a case that begins with rewards; `correction` is verl's `rollout_correction`."""
    theirs = {"algorithm": algorithm, "actor": actor, "correction": correction}
    return Case(name, "verl", "policy_loss", ours, theirs, correction is not None)


def _verl_importance(mode: str, ours: Mapping[str, Any], level: str, bounds: float | str) -> Case:
    made = {"preset": "grpo", "importance": mode, **ours}
    correction = {"rollout_is": level, "rollout_is_threshold": bounds}
    return _verl(f"importance_{mode}", made, _GROUP, correction, **_SEQUENCES, **_K3)


def _advantage(name: str, ours: Mapping[str, Any], algorithm: Mapping[str, Any]) -> Case:
    return Case(f"advantage_{name}", "verl", "advantages", ours, algorithm)


# --- settings of the peers, and of TLT

_SEQUENCES: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-mean"}
_K3: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.04, "kl_loss_type": "low_var_kl"}
_KL_IN_REWARD = {"use_kl_in_reward": True, "kl_penalty": "kl", "kl_coef": 0.01}
_GROUP = {"adv_estimator": "grpo"}
_PLUS_PLUS = {"adv_estimator": "reinforce_plus_plus"}
_BASELINE = {"adv_estimator": "reinforce_plus_plus_baseline"}
_GSPO: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon": 3e-4,
    "epsilon_high": 4e-4,
    "delta": None,
}
_OVERLONG = {"limit": LIMIT, "last": 3}
_CONSTANT = {"preset": "dr_grpo", "averaged_tokens": 9}
_WITHOUT_KL = {"preset": "reinforce++", "kl_coefficient": 0.0}

# --- cases

PRESETS = (
    _trl("grpo", {"preset": "grpo"}, loss_type="grpo", beta=0.04),
    _verl("grpo", {"preset": "grpo"}, _GROUP, **_SEQUENCES, **_K3),
    _trl("dr_grpo", _CONSTANT, loss_type="dr_grpo", max_completion_length=9),
    _verl(
        "dr_grpo",
        _CONSTANT,
        _GROUP | {"norm_adv_by_std_in_grpo": False},
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=9,
    ),
    _rloo("rloo", beta=0.0),
    _rloo("rloo_with_kl", beta=0.1, kl_in="reward", kl_coefficient=0.1),
    _verl("reinforce++", {"preset": "reinforce++"}, _PLUS_PLUS | _KL_IN_REWARD),
    _verl("reinforce++_without_kl", _WITHOUT_KL, _PLUS_PLUS),
    _verl("reinforce++-baseline", {"preset": "reinforce++-baseline"}, _BASELINE),
    _verl(
        "reinforce++-baseline_with_kl",
        {"preset": "reinforce++-baseline", "kl_in": "reward", "kl_coefficient": 0.01},
        _BASELINE | _KL_IN_REWARD,
    ),
    _trl("dapo", {"preset": "dapo"}, epsilon_high=0.28),
    _verl("dapo", {"preset": "dapo"}, _GROUP, clip_ratio_high=0.28),
    _trl("gspo", {"preset": "gspo"}, **_GSPO),
    _verl(
        "gspo",
        {"preset": "gspo"},
        _GROUP,
        loss_mode="gspo",
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        **_SEQUENCES,
    ),
    _trl("cispo", {"preset": "cispo"}, loss_type="cispo", epsilon_high=5.0),
    _verl(
        "cispo",
        {"preset": "cispo"},
        _GROUP,
        loss_mode="cispo",
        clip_ratio_low=1.0,
        clip_ratio_high=4.0,
    ),
    _trl("sapo", {"preset": "sapo"}, loss_type="sapo"),
    _verl("sapo", {"preset": "sapo"}, _GROUP, loss_mode="sapo"),
    _trl(
        "entropy",
        {"preset": "dapo", "entropy_coefficient": 0.1},
        epsilon_high=0.28,
        entropy_coef=0.1,
    ),
    _verl(
        "entropy",
        {"preset": "grpo", "entropy_coefficient": 0.1},
        _GROUP,
        entropy_coeff=0.1,
        **_SEQUENCES,
        **_K3,
    ),
)

CORRECTIONS = (
    _trl_importance("token_truncate"),
    _verl_importance("token_truncate", {}, "token", 2.0),
    _trl_importance("token_mask"),
    _verl_importance("token_mask", {"importance_floor": 0.5}, "token", "0.5_2.0"),
    _trl_importance("sequence_truncate"),
    _verl_importance("sequence_truncate", {}, "sequence", 2.0),
    _trl_importance("sequence_mask"),
    _verl_importance("sequence_mask", {"importance_floor": 0.5}, "sequence", "0.5_2.0"),
    # without KL, because verl leaves out that of rejected answers, too
    _verl(
        "importance_geometric_mask",
        {
            "preset": "grpo",
            "importance": "geometric_mask",
            "geometric_bounds": (0.6, 1 / 0.6),
            "kl_coefficient": 0.0,
        },
        _GROUP,
        {
            "rollout_is": "token",
            "rollout_is_threshold": 2.0,
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": f"0.6_{1 / 0.6}",
        },
        **_SEQUENCES,
    ),
    _trl(
        "importance_gspo",
        {"preset": "gspo", "importance_cap": 3.0},
        True,
        vllm_importance_sampling_mode="token_truncate",
        **_GSPO,
    ),
)

# without a loss
VALUES = (
    Case(
        "advantage_group",
        "trl",
        "grpo_advantages",
        {"preset": "grpo"},
        tolerance=5e-4,
        reason="TRL adds 1e-4 to the deviation, verl and TLT 1e-6",
    ),
    _advantage("group", {"preset": "grpo"}, _GROUP),
    Case(
        "advantage_group_unscaled", "trl", "grpo_advantages", _CONSTANT, {"scale_rewards": "none"}
    ),
    Case("advantage_leave_one_out", "trl", "rloo_advantages", {"preset": "rloo"}, {"beta": 0.0}),
    _advantage("leave_one_out", {"preset": "rloo"}, {"adv_estimator": "rloo"}),
    _advantage("batch", _WITHOUT_KL, _PLUS_PLUS),
    _advantage("batch_with_kl", {"preset": "reinforce++"}, _PLUS_PLUS | _KL_IN_REWARD),
    _advantage("group_batch", {"preset": "reinforce++-baseline"}, _BASELINE),
    Case("overlong_penalty", "trl", "overlong", {"overlong_tokens": 3}, _OVERLONG),
    Case("overlong_penalty", "verl", "overlong", {"overlong_tokens": 3}, _OVERLONG),
    Case("dynamic_sampling", "verl", "filtered_groups", {}),
)

CASES = (*PRESETS, *CORRECTIONS, *VALUES)
