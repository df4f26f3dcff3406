"""Generate sample messages from type annotations, so that a new field needs no edit here."""

import typing
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec.inspect
from hypothesis import strategies as st
from msgspec.inspect import Type

from tlt.base.id_types import (
    Attempt,
    Digest,
    DrafterVersion,
    Epoch,
    Incarnation,
    JobId,
    Member,
    PolicyVersion,
    PromptIndex,
    Step,
    WorkerId,
)
from tlt.base.strategies import Draft
from tlt.blobs.answer_files import Answer, pack_logprobs, pack_origins, pack_tokens
from tlt.protocol.commands import PromptIssued, StartJob, StartRollout
from tlt.protocol.events import RolloutFinished
from tlt.protocol.refs import AnswerRef, OriginSpan, PolicyRef
from tlt.protocol.shared_values import Prepared, StrategyTally, WorkerInfo
from tlt.spec.config import (
    AlgorithmSpec,
    DataSpec,
    JobSpec,
    PolicySpec,
    RewardSpec,
    RolloutSpec,
    SpeculationSpec,
)

JOB = JobId("job-1")
SPEC = JobSpec(
    policy=PolicySpec(path="/model"),
    data=DataSpec(train="/train.jsonl", eval="/eval.jsonl"),
    reward=RewardSpec(kind="numeric"),
    algorithm=AlgorithmSpec(steps=2, prompts_per_step=4, group_size=2, microbatch_tokens=8192),
    rollout=RolloutSpec(slots=16),
    speculation=SpeculationSpec(mode="off"),
)
_OTHER_SPEC = JobSpec(
    name="1e5",
    policy=PolicySpec(path="/other", max_context=512, dtype="bfloat16"),
    data=DataSpec(train="/train.parquet", answer_key=None, system_prompt="a: b\n#"),
    reward=RewardSpec(kind="regex", pattern=r"1e-4", marker="2e3", tolerance=0.5),
    algorithm=AlgorithmSpec(
        steps=9,
        prompts_per_step=1,
        group_size=8,
        learning_rate=1e-4,
        allow_filtered_sampling=True,
    ),
    rollout=RolloutSpec(stop=["1e5", "yes", "\n"], top_p=0.9),
    speculation=SpeculationSpec(mode="off"),
    seed=7,
)
specs = st.sampled_from([SPEC, _OTHER_SPEC])
ANSWER_REF = AnswerRef(file="3.0", offset=0, bytes=1, digest=Digest("0"))


def prompt(index: int, *, attempt: int = 0, member: int = 0) -> PromptIssued:
    return PromptIssued(
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(attempt),
        purpose="train",
        prompt=PromptIndex(index),
        member=Member(member),
        tokens=(1, 2, index),
    )


ORIGIN = {
    "job": JOB,
    "epoch": Epoch(1),
    "step": Step(0),
    "attempt": Attempt(0),
    "worker": WorkerId("w1"),
    "incarnation": Incarnation(3),
    "purpose": "train",
}


def answer(member: int) -> RolloutFinished:
    return RolloutFinished(
        **ORIGIN,  # pyright: ignore
        prompt=PromptIndex(4),
        member=Member(member),
        answer=ANSWER_REF,
        length=1,
        accepted=(),
        batch=1,
        decode_seconds=0.1,
        stop="stop",
    )


def written_answer(
    tokens: Sequence[int], *, origins: tuple[OriginSpan, ...] = (), text: str = "7"
) -> Answer:
    return Answer(
        prompt=(5, 6),
        token_bytes=pack_tokens(tokens),
        logprob_bytes=pack_logprobs([-0.5] * len(tokens)),
        text=text,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        policies=(),
        drafters=(),
        origin_bytes=pack_origins(origins),
        batches=(),
    )


def rolls(step: int = 0, share: int = 1, speculate: bool = True) -> StartRollout:
    return StartRollout(
        worker=WorkerId("w0"),
        incarnation=Incarnation(1),
        job=JOB,
        epoch=Epoch(1),
        step=Step(step),
        purpose="train",
        policy=PolicyRef(version=PolicyVersion(0), weights=None),
        drafter=None,
        requeues=0,
        share=share,
        keep_answers=True,
        speculate=speculate,
    )


def members(union: Any) -> tuple[type[msgspec.Struct], ...]:
    """Return the types of a closed union."""
    return tuple(dict.fromkeys(typing.get_args(union)))


def messages(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return _strategy(msgspec.inspect.type_info(kind))


def _strategy(info: Type) -> st.SearchStrategy[Any]:
    match info:
        case msgspec.inspect.StructType(cls=cls) if cls is JobSpec:
            return specs
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{f.name: _strategy(f.type) for f in fields})
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(_strategy, types))
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(_strategy(item), max_size=3).map(tuple)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(_strategy, items))
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_strategy(key), _strategy(value), max_size=3)
        case msgspec.inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case msgspec.inspect.IntType(ge=least, le=most):
            return st.integers(-(2**63) if least is None else least, most or 2**63 - 1)
        case msgspec.inspect.FloatType(ge=least, le=most):
            return st.floats(least, most, allow_nan=False, allow_infinity=False)
        case msgspec.inspect.StrType(pattern=None):
            return st.text(max_size=8)
        case msgspec.inspect.StrType(pattern=str(pattern)):
            return st.from_regex(pattern).filter(lambda text: len(text) < 9)
        case msgspec.inspect.BytesType():
            return st.binary(max_size=8)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case _:
            raise AssertionError(f"no samples for {info}")


def started(spec: JobSpec, ranks: Mapping[WorkerId, int]) -> StartJob:
    """Return the start of a job with one step of prompts; its workers have these ranks."""
    return StartJob(
        job=JOB,
        epoch=Epoch(1),
        spec=spec,
        folder="/runs",
        prepared=Prepared(train_prompts=spec.algorithm.prompts_per_step, eval_prompts=0),
        workers=tuple(worker_info(worker, count) for worker, count in ranks.items()),
    )


def worker_info(worker: WorkerId, ranks: int, incarnation: int = 1) -> WorkerInfo:
    return WorkerInfo(
        worker=worker,
        incarnation=Incarnation(incarnation),
        ranks=ranks,
        host="here",
        rendezvous="",
    )


def tally(tokens: int, seconds: float, **changes: Any) -> StrategyTally:
    values: dict[str, Any] = {
        "strategy": Draft(depth=2),
        "bucket": 1,
        "drafter": DrafterVersion(0),
        "control": None,
        "steps": 1,
        "explored": 0,
        "rows": 1,
        "tokens": tokens,
        "seconds": seconds,
        "work": seconds,
        "overhead": 0.0,
        "expected": 0.0,
    }
    return StrategyTally(**{**values, **changes})
