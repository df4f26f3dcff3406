"""What a training learns from and is measured by: rows of a file, none of them in both.

What the drafter is measured by, the policy has drawn itself, whoever wrote what it learns from.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from cli.drafter_checkpoint import Notes
from cli.drafter_train_args import Plan
from tlt.config import DataSpec
from tlt.dataset import rows
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.errors import ConfigError, DataError
from tlt.ids import Member, PolicyVersion, PromptIndex, Step
from tlt.models.decoder_spec import Decoder
from tlt.models.eagle_drafter import DrafterConfig
from tlt.models.tokenizer import Tokenizer
from tlt.ranks.drafter_samples import Text, answered, read, rollout, sample
from tlt.trainer.drafter.accept_length import PolicyRollout
from tlt.trainer.drafter.samples import DrafterSample, state_layers

_ANSWERS = "answers.json"
_REPORTS = 8


@dataclass(frozen=True, kw_only=True)
class Material:
    samples: list[DrafterSample]
    held_out: list[PolicyRollout]


@dataclass(frozen=True, kw_only=True)
class _Row:
    prompt: tuple[int, ...]
    # nothing where the policy is to write it
    answer: tuple[int, ...]


def gather(
    plan: Plan,
    policy: Decoder,
    config: DrafterConfig,
    notes: Notes,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
) -> Material | None:
    """Nothing, if it was stopped: what had been answered by then is noted."""
    tokenizer = Tokenizer(plan.policy)
    context = min(plan.max_context, policy.config.max_positions, config.max_positions)
    held, learned = _split(plan, list(_rows(plan, tokenizer, context)))
    requests = _requests(plan, held, learned, tokenizer.stop_tokens(), context)
    noted = {text.id: text for text in notes.read(_ANSWERS, list[Text]) or ()}
    given = _given(plan, learned, len(held)) if plan.answers_given else []
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
        answered(engine, [request for id, request in requests.items() if id not in noted]),
        read(engine, [*noted.values(), *given]),
    )
    found: dict[int, tuple[Text, torch.Tensor]] = {}
    total = len(requests) + len(given)
    try:
        for text, states in passes:
            found[text.id] = text, states
            if len(found) * _REPORTS // total > (len(found) - 1) * _REPORTS // total:
                say(f"{len(found)} of {total} answers to learn from and to measure by")
            if stopped():
                return None
    finally:
        written = [text for text, _ in found.values() if text.id in requests]
        noted |= {text.id: text for text in written}
        notes.write(_ANSWERS, list(noted.values()))
        engine.close()
    return _material(found, requests, len(held), policy.config.vocabulary)


def _rows(plan: Plan, tokenizer: Tokenizer, context: int) -> Iterator[_Row]:
    """As many as are wanted; an answer that doesn't fit the context is cut."""
    spec = DataSpec(
        train=plan.file,
        prompt_key=plan.prompt_key,
        answer_key=plan.answer_key if plan.answers_given else None,
        chat_template=plan.chat_template,
        system_prompt=plan.system_prompt,
    )
    for number, (place, row) in enumerate(rows(Path(plan.file), spec)):
        if number == plan.samples + plan.held_out:
            return
        prompt = tokenizer.prompt_tokens(row[plan.prompt_key], spec, place)
        if len(prompt) + 2 > context:
            raise DataError(f"{place}: {len(prompt)} tokens leave no room in {context}")
        answer = row[plan.answer_key] if plan.answers_given else ""
        if not isinstance(answer, str):
            raise DataError(f"{place}: '{plan.answer_key}' is not text")
        tokens = tokenizer.answer_tokens(answer) if plan.answers_given else ()
        yield _Row(prompt=prompt, answer=tokens[: context - len(prompt)])


def _split(plan: Plan, found: Sequence[_Row]) -> tuple[list[_Row], list[_Row]]:
    if len(found) <= plan.held_out:
        raise ConfigError(
            f"{plan.file}: {len(found)} rows, of which {plan.held_out} are held out: "
            "none is left to learn from (--held-out)"
        )
    dice = random.Random(f"held out {plan.seed}")
    held = set(dice.sample(range(len(found)), plan.held_out))
    return (
        [row for index, row in enumerate(found) if index in held],
        [row for index, row in enumerate(found) if index not in held],
    )


def _requests(
    plan: Plan,
    held: Sequence[_Row],
    learned: Sequence[_Row],
    stop_tokens: frozenset[int],
    context: int,
) -> dict[int, Request]:
    """Those to measure by come first; too few prompts to learn from are answered again."""

    def request(id: int, prompt: tuple[int, ...], index: int, member: int) -> Request:
        return Request(
            id=id,
            prompt=prompt,
            key=NoiseKey(
                seed=plan.seed,
                step=Step(0),
                purpose="eval" if id < len(held) else "train",
                prompt=PromptIndex(index),
                member=Member(member),
            ),
            sampling=Sampling(),
            max_new_tokens=context - len(prompt),
            stop_tokens=stop_tokens,
        )

    found = [request(id, row.prompt, id, 0) for id, row in enumerate(held)]
    for number in range(0 if plan.answers_given else plan.samples):
        member, index = divmod(number, len(learned))
        found.append(request(len(held) + number, learned[index].prompt, index, member))
    return {request.id: request for request in found}


def _given(plan: Plan, learned: Sequence[_Row], first: int) -> list[Text]:
    return [
        Text(id=first + index, tokens=(*row.prompt, *row.answer), prompt=len(row.prompt))
        for index, row in enumerate(learned[: plan.samples])
    ]


def _material(
    found: dict[int, tuple[Text, torch.Tensor]],
    requests: dict[int, Request],
    held: int,
    vocabulary: int,
) -> Material:
    """In the order of the file, whatever ended first; an answer of one token may teach nothing."""
    pairs = [found[id] for id in sorted(found) if len(found[id][0].tokens) > 2]
    return Material(
        samples=[sample(text, states) for text, states in pairs if text.id >= held],
        held_out=[
            rollout(text, states, requests[text.id].key, vocabulary)
            for text, states in pairs
            if text.id < held
        ],
    )
