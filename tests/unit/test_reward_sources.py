"""A reward names the sources that it scores; names that nothing has are refused."""

import re
from typing import Any

import msgspec
import pytest

from tests.samples import SPEC
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import DataSpec, EvaluationSet, SourceSpec
from tlt.spec.reward import RewardSpec

DATA = DataSpec(
    train=(SourceSpec(path="gsm8k.jsonl"), SourceSpec(path="hf://owner/taco", name="code")),
    eval={"aime24": EvaluationSet(path="aime.jsonl")},
)


def spec_of(data: DataSpec, *sources: tuple[str, ...] | None) -> JobSpec:
    rewards = tuple(
        RewardSpec(kind="numeric", name=str(index), sources=names)
        for index, names in enumerate(sources)
    )
    reward = rewards if len(rewards) > 1 else rewards[0]
    return msgspec.structs.replace(SPEC, data=data, reward=reward)


def test_names_are_those_of_sources_and_sets() -> None:
    spec = spec_of(DATA, ("gsm8k", "aime24"), ("code",))
    assert [reward.applies_to(["code"]) for reward in spec.rewards] == [False, True]
    assert [reward.applies_to(["x", "gsm8k"]) for reward in spec.rewards] == [True, False]
    # a row of which nothing is known is scored by all
    assert [reward.applies_to(None) for reward in spec.rewards] == [True, True]
    spec_of(DATA, None, ("code",))
    spec_of(DataSpec(train="train.jsonl", eval="test.jsonl"), ("train",), ("eval",))


@pytest.mark.parametrize(
    ("data", "sources", "complaint"),
    [
        (DATA, (("gsm8k", "aime24", "coda"), ("code",)),
         "reward.0.sources: no source or set has the name 'coda'; did you mean 'code'?"),
        (DATA, (None, ("zzz",)),
         "reward.1.sources: no source or set has the name 'zzz'; known: aime24, code, gsm8k"),
        (DATA, (("gsm8k", "code", "aime"),),
         "reward.sources: no source or set has the name 'aime'; did you mean 'aime24'?"),
        (DATA, (("gsm8k",), ("aime24",)), "data.train.1: no reward scores 'code'"),
        (DATA, (("gsm8k",), ("code",)), "data.eval.aime24: no reward scores 'aime24'"),
        (DataSpec(train="a/train.jsonl", eval="b"), (("eval",),),
         "data.train: no reward scores 'train'"),
        (DataSpec(train="a/train.jsonl", eval="b"), (("train",),),
         "data.eval: no reward scores 'eval'"),
    ],
)  # fmt: skip
def test_refuses_names_that_nothing_has_and_what_no_reward_scores(
    data: DataSpec, sources: tuple[Any, ...], complaint: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        spec_of(data, *sources)


def test_names_in_a_column_are_known_once_it_is_read() -> None:
    spec_of(msgspec.structs.replace(DATA, source_key="data_source"), ("taco",))


def test_refuses_an_empty_list() -> None:
    with pytest.raises(ValueError, match="sources must not be empty"):
        RewardSpec(kind="numeric", sources=())
