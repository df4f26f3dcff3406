"""Start SGLang as a job does that has no drafter yet, and check what it decodes and proposes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from tests.engine import drafter_models
from tests.engine.reference import GREEDY, greedy_answer, new_request, random_prompts
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Draft, Ngram, Off, Strategy
from tlt.engine.base import Completion, Request
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.engine.sglang.shared.scheduler_options import Proposal, SpeculationOptions
from tlt.engine.sglang.shared.shared_hidden_state_buffer import RequestName
from tlt.models.drafter_folder import save_drafter
from tlt.models.eagle_drafter import Drafter
from tlt.protocol.shared_values import StrategyTally

ARMS = (Off(), Draft(depth=2, noise=False), Draft(depth=4, noise=False), Ngram(tokens=4))
CHAIN, NGRAM = Draft(depth=4, noise=False), Ngram(tokens=4)
SLOTS = 64
CONTEXT = 128
FIRST, SECOND = DrafterVersion(1), DrafterVersion(2)


class Memoryless(NamedTuple):
    """A policy whose tokens depend on nothing, and a drafter that proposes the likeliest."""

    logits: torch.Tensor
    weights: dict[str, torch.Tensor]
    drafter: Drafter


def start(
    folder: Path,
    policy: Path,
    layout: drafter_models.Layout,
    script: Sequence[tuple[Strategy, int]],
    tensor_parallel: int = 1,
    hot_tokens: int | None = None,
    slots: int = SLOTS,
    cache_tokens: int | None = None,
) -> SglangEngine:
    """Start as a job does that has no drafter yet."""
    drafter = drafter_models.random_drafter(layout, seed=2)
    if hot_tokens is not None:
        drafter = drafter_models.with_hot_tokens(drafter, range(hot_tokens))
    save_drafter(drafter, folder / "drafter")
    client, tap = start_client(
        policy,
        slots=slots,
        max_context=CONTEXT,
        device=torch.device("cpu"),
        dtype=torch.float32,
        version=PolicyVersion(0),
        folder=folder,
        stuck_seconds=60,
        captured=drafter_models.captured(layout),
        speculation=SpeculationOptions(
            algorithm="EAGLE" if layout == "eagle" else "EAGLE3",
            drafter=str(folder / "drafter"),
            trained=False,
            hot=hot_tokens is not None,
            layers=len(drafter.config.captured),
            arms=ARMS,
            script=tuple(script),
            seed=5,
        ),
        proposals=folder / "proposals",
        cores=((),) * tensor_parallel,
        cache_tokens=cache_tokens,
    )
    return SglangEngine(client, policy, tap, str, slots, CONTEXT, PolicyVersion(0))


def requests(count: int = 12, tokens: int = 60) -> list[Request]:
    """Return greedy requests, in groups of two of the same prompt."""
    prompts = random_prompts(count // 2, shortest=4, longest=20)
    return [new_request(i, prompts[i // 2], GREEDY, tokens) for i in range(count)]


def check_greedy(policy: Path, submitted: list[Request], done: dict[int, Completion]) -> None:
    for request in submitted:
        expected = greedy_answer(policy, request.prompt, request.max_new_tokens)
        assert done[request.id].tokens == expected


def finish_tallies(engine: SglangEngine) -> list[StrategyTally]:
    """Return the tallies of all that was decoded; the scheduler reports the last when it idles."""
    found = [*engine.take_strategy_tallies()]
    key = random_prompts(1, shortest=10)[0]
    # a text that is read makes the scheduler report what it decoded before
    engine.compute_hidden_states([*key, 1], lambda: None)
    return [*found, *engine.take_strategy_tallies()]


def proposals(folder: Path) -> list[Proposal]:
    lines = (folder / "proposals").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Proposal) for line in lines]


def check_proposals(
    made: list[Proposal],
    submitted: list[Request],
    done: dict[int, Completion],
    drafter: Drafter,
    policy: Path,
) -> int:
    """Check that the proposals are those of a drafter that read the whole texts; count them."""
    first = min(RequestName.read(proposal.name).serial for proposal in made)
    checked = 0
    for proposal in made:
        answered = submitted[RequestName.read(proposal.name).serial - first]
        text = [*answered.prompt, *done[answered.id].tokens][: proposal.seen + 1]
        if len(text) <= proposal.seen:
            continue  # proposed beyond the answer's end
        expected = drafter_models.proposed(drafter, policy, text, CHAIN.depth)
        assert proposal.tokens == [text[-1], *expected]
        checked += 1
    return checked


def origins(done: dict[int, Completion]) -> dict[str, int]:
    found: dict[str, int] = {}
    for completion in done.values():
        for span in completion.origins:
            found[span.origin] = found.get(span.origin, 0) + span.tokens
    return found


def drafters(done: dict[int, Completion]) -> set[DrafterVersion | None]:
    return {span.version for completion in done.values() for span in completion.drafters}
