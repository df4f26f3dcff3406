"""Collect the answers for training and those for evaluation: disjoint rows of a file.

The held-out answers are always sampled from the policy itself, even where the file has answers.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from tlt.base.id_types import Member, PolicyVersion, PromptIndex, Step
from tlt.data.columns import column_of
from tlt.data.dataset import rows
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.errors import ConfigError, DataError
from tlt.models.decoder_spec import Decoder
from tlt.models.eagle_drafter import DrafterConfig
from tlt.models.tokenizer import Tokenizer
from tlt.offline_drafter.resumable_training_files import TrainingFiles, TrainingPlan
from tlt.ranks.drafter.samples_from_engine import Text, answered, read, rollout, sample
from tlt.spec.config import DataSpec
from tlt.spec.prompt_files import Column, PromptFile
from tlt.trainer.drafter.accept_length import PolicyRollout
from tlt.trainer.drafter.samples import DrafterSample, state_layers

_ANSWERS = "answers.json"
_REPORTS = 8


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    samples: list[DrafterSample]
    held_out: list[PolicyRollout]


@dataclass(frozen=True, kw_only=True)
class _Row:
    prompt: tuple[int, ...]
    # empty where the policy generates it
    answer: tuple[int, ...]


def gather(
    plan: TrainingPlan,
    policy: Decoder,
    config: DrafterConfig,
    files: TrainingFiles,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
) -> TrainingData | None:
    """Return the data, or None if `stopped` interrupted it; finished answers are stored."""
    tokenizer = Tokenizer(plan.policy)
    context = min(plan.max_context, policy.config.max_positions, config.max_positions)
    held_out, training = _split(plan, list(_rows(plan, tokenizer, context)))
    requests = _requests(plan, held_out, training, tokenizer.stop_tokens(), context)
    stored = {text.id: text for text in files.read(_ANSWERS, list[Text]) or ()}
    given = _given(plan, training, len(held_out)) if plan.answers_given else []
    engine = NativeEngine(
        policy,
        decode_text=tokenizer.decode,
        slots=plan.slots,
        max_context=context,
        device=torch.device("cpu"),
        version=PolicyVersion(0),
        captured=state_layers(config, policy.config.layers),
    )
    passes = chain(
        answered(engine, [request for id, request in requests.items() if id not in stored]),
        read(engine, [*stored.values(), *given]),
    )
    found: dict[int, tuple[Text, torch.Tensor]] = {}
    total = len(requests) + len(given)
    try:
        for text, states in passes:
            found[text.id] = text, states
            if len(found) * _REPORTS // total > (len(found) - 1) * _REPORTS // total:
                say(f"{len(found)} of {total} answers collected for training and evaluation")
            if stopped():
                return None
    finally:
        generated = [text for text, _ in found.values() if text.id in requests]
        stored |= {text.id: text for text in generated}
        files.write(_ANSWERS, list(stored.values()))
        engine.close()
    return _training_data(found, requests, len(held_out), policy.config.vocabulary)


def _rows(plan: TrainingPlan, tokenizer: Tokenizer, context: int) -> Iterator[_Row]:
    """Yield as many rows as the plan needs; cut answers that do not fit the context."""
    spec = DataSpec(
        train=plan.file,
        chat_template=plan.chat_template,
        system_prompt=plan.system_prompt,
    )
    file = PromptFile(
        name=plan.file,
        key="--data",
        path=plan.file,
        prompt=Column(plan.prompt_key, "--prompt-key"),
        answer=Column(plan.answer_key, "--answer-key") if plan.answers_given else None,
    )
    for number, (place, row) in enumerate(rows(file)):
        if number == plan.samples + plan.held_out:
            return
        prompt = tokenizer.prompt_tokens(column_of(row, plan.prompt_key), spec, place)
        if len(prompt) + 2 > context:
            raise DataError(f"{place}: {len(prompt)} tokens leave no room in {context}")
        answer = column_of(row, plan.answer_key) if plan.answers_given else ""
        if not isinstance(answer, str):
            raise DataError(f"{place}: '{plan.answer_key}' is not text")
        tokens = tokenizer.answer_tokens(answer) if plan.answers_given else ()
        yield _Row(prompt=prompt, answer=tokens[: context - len(prompt)])


def _split(plan: TrainingPlan, found: Sequence[_Row]) -> tuple[list[_Row], list[_Row]]:
    if len(found) <= plan.held_out:
        raise ConfigError(
            f"{plan.file}: {len(found)} rows, of which {plan.held_out} are held out: "
            "none is left to train on (--held-out)"
        )
    rng = random.Random(f"held out {plan.seed}")
    held = set(rng.sample(range(len(found)), plan.held_out))
    return (
        [row for index, row in enumerate(found) if index in held],
        [row for index, row in enumerate(found) if index not in held],
    )


def _requests(
    plan: TrainingPlan,
    held_out: Sequence[_Row],
    training: Sequence[_Row],
    stop_tokens: frozenset[int],
    context: int,
) -> dict[int, Request]:
    """Return the held-out requests, then those to train on, which repeat prompts as needed."""

    def request(id: int, prompt: tuple[int, ...], index: int, member: int) -> Request:
        return Request(
            id=id,
            prompt=prompt,
            key=NoiseKey(
                seed=plan.seed,
                step=Step(0),
                purpose="eval" if id < len(held_out) else "train",
                prompt=PromptIndex(index),
                member=Member(member),
            ),
            sampling=Sampling(),
            max_new_tokens=context - len(prompt),
            stop_tokens=stop_tokens,
        )

    found = [request(id, row.prompt, id, 0) for id, row in enumerate(held_out)]
    for number in range(0 if plan.answers_given else plan.samples):
        member, index = divmod(number, len(training))
        found.append(request(len(held_out) + number, training[index].prompt, index, member))
    return {request.id: request for request in found}


def _given(plan: TrainingPlan, training: Sequence[_Row], first: int) -> list[Text]:
    return [
        Text(id=first + index, tokens=(*row.prompt, *row.answer), prompt=len(row.prompt))
        for index, row in enumerate(training[: plan.samples])
    ]


def _training_data(
    found: dict[int, tuple[Text, torch.Tensor]],
    requests: dict[int, Request],
    held_out: int,
    vocabulary: int,
) -> TrainingData:
    """Return the data in the order of the file, without answers too short to train on."""
    pairs = [found[id] for id in sorted(found) if len(found[id][0].tokens) > 2]
    return TrainingData(
        samples=[sample(text, states) for text, states in pairs if text.id >= held_out],
        held_out=[
            rollout(text, states, requests[text.id].key, vocabulary)
            for text, states in pairs
            if text.id < held_out
        ],
    )
