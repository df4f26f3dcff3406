"""A preset fills in what belongs to a method, and leaves what the spec sets."""

from pathlib import Path

import pytest

from tlt.errors import ConfigError
from tlt.spec.algorithm_presets import PRESETS
from tlt.spec.config import AlgorithmSpec, JobSpec
from tlt.spec.spec_files import load_job_spec, to_yaml

SPEC = """
policy: {path: policy}
data: {train: train.jsonl}
reward: {kind: numeric}
rollout: {max_new_tokens: 300}
algorithm: {steps: 2, prompts_per_step: 2, group_size: 2}
"""


def load(folder: Path, *changes: str) -> JobSpec:
    (folder / "job.yaml").write_text(SPEC)
    return load_job_spec(folder / "job.yaml", list(changes))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_sets_what_it_names(tmp_path: Path, name: str) -> None:
    algorithm = load(tmp_path, f"algorithm.preset={name}").algorithm
    assert {key: getattr(algorithm, key) for key in PRESETS[name]} == PRESETS[name]
    assert PRESETS[name].keys() <= set(AlgorithmSpec.__struct_fields__)


def test_a_preset_leaves_what_the_spec_sets(tmp_path: Path) -> None:
    changes = ("algorithm.preset=gspo", "algorithm.clip_high=0.01")
    algorithm = load(tmp_path, *changes).algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (3e-4, 0.01)


def test_dr_grpo_divides_by_the_longest_answer(tmp_path: Path) -> None:
    assert load(tmp_path, "algorithm.preset=dr_grpo").algorithm.averaged_tokens == 300


def test_a_spec_that_was_shown_is_the_same_spec(tmp_path: Path) -> None:
    made = load(tmp_path, "algorithm.preset=cispo")
    (tmp_path / "shown.yaml").write_text(to_yaml(made))
    assert load_job_spec(tmp_path / "shown.yaml") == made


def test_an_unknown_preset_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no preset 'ppo': grpo, dr_grpo, rloo"):
        load(tmp_path, "algorithm.preset=ppo")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (["algorithm.loss=gspo"], "needs averaging sequence"),
        (["algorithm.averaging=constant"], "goes with averaged_tokens"),
        (["algorithm.averaged_tokens=5"], "goes with averaged_tokens"),
    ],
)
def test_keys_that_do_not_fit_are_refused(
    tmp_path: Path, changes: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path, *changes)
