"""Activations are computed again where the policy is large, unless the spec says otherwise."""

from pathlib import Path

import pytest

from tests.trainer.models import CPU, save_llama, spec
from tlt.policies.algorithm import activation_checkpointing
from tlt.policies.algorithm.activation_checkpointing import checkpoints_activations
from tlt.trainer.policy.policy_learner import PolicyLearner


@pytest.mark.parametrize(
    ("setting", "weights", "expected"),
    [
        ("auto", 494_032_768, False),
        ("auto", 3_085_938_688, True),
        (False, 8_000_000_000, False),
        (True, 1_000, True),
    ],
)
def test_decides_by_the_number_of_weights(setting: bool, weights: int, expected: bool) -> None:
    assert checkpoints_activations(setting, weights) is expected


@pytest.mark.parametrize("least", [1_000, 1_000_000])
def test_a_learner_counts_its_policys_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(activation_checkpointing, "_LEAST_WEIGHTS", least)
    learner = PolicyLearner(save_llama(tmp_path), spec(), None, CPU)
    assert learner._models.policy.is_gradient_checkpointing is (least == 1_000)
