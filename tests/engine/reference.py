"""Compute reference answers with Transformers, and drive engines."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tlt.base.id_types import Member, PromptIndex, Step
from tlt.engine.base import Completion, Engine, NoiseKey, Request, Sampling
from tlt.engine.native.gumbel_noise import GumbelNoise, key_word

GREEDY = Sampling(temperature=0)


@lru_cache
def transformers_model(folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def greedy_answer(folder: Path, prompt: Sequence[int], tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = transformers_model(folder).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def forced_logits(
    policy: Path | PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]
) -> torch.Tensor:
    """Return [answer, vocabulary]: the logits that each token of the answer was drawn from."""
    model = transformers_model(policy) if isinstance(policy, Path) else policy
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]], device=model.device)).logits[0]
    return logits[len(prompt) - 1 : -1]


def gap_at_the_fork(
    policy: Path | PreTrainedModel, request: Request, one: Sequence[int], other: Sequence[int]
) -> float:
    """Return the gap between the two best perturbed logits where two answers diverge."""
    fork = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    logits = forced_logits(policy, request.prompt, one[: fork + 1])[fork]
    key, position = torch.tensor([key_word(request.key)]), len(request.prompt) + fork
    noise = GumbelNoise(len(logits), torch.device("cpu")).gumbel(key, torch.tensor([position]))[0]
    best = (logits + noise).topk(2).values
    return (best[0] - best[1]).item()


def logprobs_of(logits: torch.Tensor, answer: Sequence[int], temperature: float) -> torch.Tensor:
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def random_prompts(count: int, shortest: int = 1, longest: int = 20) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [tuple(torch.randint(0, 97, (n,), generator=generator).tolist()) for n in lengths]


def new_request(
    id: int,
    prompt: Sequence[int],
    sampling: Sampling = GREEDY,
    max_new_tokens: int = 20,
    stop_tokens: Iterable[int] = (),
    stop_strings: tuple[str, ...] = (),
    member: int | None = None,
    seed: int = 7,
) -> Request:
    return Request(
        id=id,
        prompt=tuple(prompt),
        key=NoiseKey(
            seed=seed,
            step=Step(3),
            purpose="train",
            prompt=PromptIndex(5),
            member=Member(id if member is None else member),
        ),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_tokens=frozenset(stop_tokens),
        stop_strings=stop_strings,
    )


def finish(engine: Engine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while engine.running:
        for completion in engine.step():
            assert completion.id not in done
            done[completion.id] = completion
    return done


def answers(engine: Engine, requests: Sequence[Request]) -> dict[int, Completion]:
    engine.submit(requests)
    return finish(engine)


def show(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def drain(engine: Engine) -> None:
    """Cancel all requests that a test left behind."""
    engine.cancel(range(100_000))
    while engine.running or engine.step():
        pass
