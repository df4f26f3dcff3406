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


def test_dr_grpo_divides_by_the_default_of_the_longest_answer(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SPEC.replace("rollout: {max_new_tokens: 300}\n", ""))
    made = load_job_spec(tmp_path / "job.yaml", ["algorithm.preset=dr_grpo"])
    assert made.algorithm.averaged_tokens == made.rollout.max_new_tokens == 1024


def test_cispos_weight_is_capped_at_5(tmp_path: Path) -> None:
    assert 1 + load(tmp_path, "algorithm.preset=cispo").algorithm.clip_high == 5


def test_reinforce_takes_a_penalty_from_its_rewards(tmp_path: Path) -> None:
    algorithm = load(tmp_path, "algorithm.preset=reinforce++").algorithm
    assert algorithm.advantages_in_update
    assert algorithm.kl_coefficient > 0


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_promises_a_clip_that_never_acts(tmp_path: Path, name: str) -> None:
    assert load(tmp_path, f"algorithm.preset={name}").warnings == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["algorithm.preset=gspo", "algorithm.minibatches=1"], "gspo"),
        (["algorithm.loss=cispo"], "loss cispo"),
        (["algorithm.clip_high=0.3"], "loss clipped"),
    ],
)
def test_a_clip_that_never_acts_is_warned_of(
    tmp_path: Path, changes: list[str], named: str
) -> None:
    (warning,) = load(tmp_path, *changes).warnings
    assert warning.startswith(f"algorithm: {named} never clips with minibatches: 1")
    assert load(tmp_path, *changes, "algorithm.epochs=2").warnings == ()


def test_a_plain_spec_is_not_warned_of(tmp_path: Path) -> None:
    assert load(tmp_path).warnings == ()


def test_a_function_beside_the_spec_is_named_by_its_file(tmp_path: Path) -> None:
    algorithm = load(
        tmp_path, "algorithm.loss=own.py:loss", "algorithm.advantage=own.py:advantage"
    ).algorithm
    assert algorithm.loss == f"{tmp_path}/own.py:loss"
    assert algorithm.advantage == f"{tmp_path}/own.py:advantage"


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
        (["algorithm.loss=rloo"], "needs averaging sequence"),
        (["algorithm.loss=ppo"], "no loss 'ppo': clipped, gspo"),
        (["algorithm.advantage=gae"], "no advantage 'gae': group, "),
        (["algorithm.preset=reinforce++", "algorithm.mask_truncated=true"], "mask_truncated"),
        (["algorithm.geometric_bounds=[1.1, 1.2]"], "a bound below 1 and one above"),
        (["algorithm.averaging=constant"], "goes with averaged_tokens"),
        (["algorithm.averaged_tokens=5"], "goes with averaged_tokens"),
    ],
)
def test_keys_that_do_not_fit_are_refused(
    tmp_path: Path, changes: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path, *changes)
