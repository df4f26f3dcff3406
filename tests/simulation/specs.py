"""Make small job specs and drafter bases for simulations."""

from typing import Literal

from msgspec import UNSET, UnsetType

from tlt.base.id_types import DrafterVersion
from tlt.protocol.refs import DrafterBase
from tlt.spec.config import (
    AlgorithmSpec,
    DataSpec,
    DrafterSpec,
    JobSpec,
    PolicySpec,
    RewardSpec,
    RolloutSpec,
    SpeculationSpec,
    WorkersSpec,
)
from tlt.spec.data_and_algorithm import EvaluationSet


def small_spec(
    *,
    steps: int = 2,
    prompts: int = 2,
    group: int = 2,
    minibatches: int = 1,
    checkpoint_every: int = 2,
    eval_every: int = 0,
    max_tries: int = 3,
    max_restarts: int = 1_000_000,
    train: Literal["off", "auto", "always"] = "off",
    merge_every: int | Literal["auto"] = 8,
    drafter: str | None = None,
    seed: int = 0,
    shards: Literal[1, "all"] = 1,
    dynamic_sampling: bool = False,
    max_num_gen_batches: float = 3.0,
    skip_solved_epochs: int = 0,
    workers: int | UnsetType = UNSET,
    partial: float = 0.0,
    defer_long: float = 0.0,
    staleness: Literal[0, 1] = 0,
) -> JobSpec:
    return JobSpec(
        policy=PolicySpec(path="policy"),
        data=DataSpec(
            train="train.jsonl",
            eval={
                "hard": EvaluationSet(path="hard.jsonl", answers=2),
                "easy": EvaluationSet(path="easy.jsonl"),
            },
            skip_solved_epochs=skip_solved_epochs,
        ),
        reward=RewardSpec(kind="final_answer"),
        algorithm=AlgorithmSpec(
            steps=steps,
            prompts_per_step=prompts,
            group_size=group,
            minibatches=minibatches,
            checkpoint_every=checkpoint_every,
            eval_every=eval_every,
            shards=shards,
            dynamic_sampling=dynamic_sampling,
            max_num_gen_batches=max_num_gen_batches,
            staleness=staleness,
        ),
        rollout=RolloutSpec(max_tries=max_tries, slots=2, partial=partial, defer_long=defer_long),
        speculation=SpeculationSpec(mode="off" if train == "off" else "adaptive"),
        drafter=DrafterSpec(train=train, merge_every=merge_every, path=drafter),
        workers=WorkersSpec(count=workers, max_restarts=max_restarts),
        seed=seed,
    )


def base_with(micro_batches: int) -> DrafterBase:
    first = DrafterVersion(1)
    return DrafterBase(
        version=first, root=first, weights=None, updates=micro_batches, micro_batches=micro_batches
    )
