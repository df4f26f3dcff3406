"""Start SGLang as a job does that has no drafter yet, and check what it decodes and proposes."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from tests.engine import drafter_models
from tests.engine.chi_square import p_value
from tests.engine.reference import (
    GREEDY,
    answers,
    finish,
    greedy_answer,
    new_request,
    random_prompts,
)
from tests.engine.test_sampled_distribution import TRIALS
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Draft, Ngram, Off, Strategy
from tlt.engine.base import Completion, Request, Sampling
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.sglang_client import SglangClient
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.engine.sglang.shared.scheduler_options import Proposal, SpeculationOptions
from tlt.engine.sglang.shared.shared_hidden_state_buffer import RequestName, Tap
from tlt.models.config_json import read_config
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.drafter_folder import save_drafter
from tlt.models.eagle_drafter import Drafter
from tlt.protocol.shared_values import StrategyTally
from tlt.trainer.drafter.samples import state_layers

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


def start_server(
    policy: Path, folder: Path, slots: int = SLOTS, **options: Any
) -> tuple[SglangClient, Tap]:
    """Start SGLang on a CPU, with more options of `start_client`."""
    settings: dict[str, Any] = {
        "slots": slots,
        "max_context": CONTEXT,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "version": PolicyVersion(0),
        "folder": folder,
        "stuck_seconds": 60,
    }
    return start_client(policy, **{**settings, **options})


def start_engine(policy: Path, folder: Path, slots: int = SLOTS, **options: Any) -> SglangEngine:
    client, tap = start_server(policy, folder, slots, **options)
    return SglangEngine(client, policy, tap, str, slots, CONTEXT, PolicyVersion(0))


def with_drafter(
    drafter: Drafter, policy: Path, folder: Path, head: torch.Tensor | None = None, **options: Any
) -> dict[str, Any]:
    """Save a drafter, and return the options of an engine that always decodes with it.

    `options` are others of its speculation.
    """
    config = drafter.config
    save_drafter(drafter, folder / "drafter", policy_head=head)
    settings: dict[str, Any] = {
        "algorithm": "EAGLE" if config.layout == "eagle" else "EAGLE3",
        "drafter": str(folder / "drafter"),
        "trained": True,
        "layers": len(config.captured),
        "arms": (CHAIN,),
        "fixed": CHAIN,
    }
    return {
        "captured": state_layers(config, read_config(policy).layers),
        "speculation": SpeculationOptions(**{**settings, **options}),
        "proposals": folder / "proposals",
    }


def start(
    folder: Path,
    policy: Path,
    layout: drafter_models.Layout,
    script: Sequence[tuple[Strategy, int]],
    hot_tokens: int | None = None,
    **options: Any,
) -> SglangEngine:
    """Start as a job does that has no drafter yet."""
    drafter = drafter_models.random_drafter(layout, seed=2)
    if hot_tokens is not None:
        drafter = drafter_models.with_hot_tokens(drafter, range(hot_tokens))
    speculation = with_drafter(
        drafter,
        policy,
        folder,
        trained=False,
        hot=hot_tokens is not None,
        arms=ARMS,
        fixed=None,
        script=tuple(script),
        seed=5,
    )
    return start_engine(policy, folder, **speculation, **options)


def make_memoryless(folder: Path, likeliest: int) -> Memoryless:
    logits = 1.5 * torch.randn(97, generator=torch.Generator().manual_seed(3))
    # drafts of this token are often right
    logits[likeliest] = 5.0
    state = drafter_models.memoryless_policy(folder / "policy", logits)
    weights = dict(load_decoder(folder / "policy").weights)
    return Memoryless(logits, weights, drafter_models.constant_drafter(state))


@contextmanager
def swapped(
    engine: SglangEngine, policy: Path, weights: dict[str, torch.Tensor]
) -> Generator[None]:
    """Decode with other weights, and then with the policy's again."""
    engine.swap_weights(PolicyVersion(engine.version + 1), weights)
    try:
        yield
    finally:
        weights = dict(load_decoder(policy).weights)
        engine.swap_weights(PolicyVersion(engine.version + 1), weights)


def draw(
    engine: SglangEngine, temperature: float = 1.0, together: int | None = None
) -> dict[int, Completion]:
    """Draw tokens that depend on no others, most of them in decode steps; `together` at once."""
    tokens, prompt = 98, random_prompts(1, shortest=5)[0]
    count = -(-TRIALS["sglang"].draws // tokens)
    sampling, done = Sampling(temperature=temperature), dict[int, Completion]()
    for begin in range(0, count, together or count):
        ids = range(begin, min(begin + (together or count), count))
        done |= answers(engine, [new_request(i, prompt, sampling, tokens) for i in ids])
    assert len(done) == count
    return done


def check_frequencies(
    done: dict[int, Completion], logits: torch.Tensor, temperature: float = 1.0
) -> None:
    drawn = torch.tensor([token for completion in done.values() for token in completion.tokens])
    found = p_value(drawn.bincount(minlength=97), (logits / temperature).softmax(-1))
    assert found > TRIALS["sglang"].significance


def decode_until(engine: SglangEngine, id: int, tokens: int) -> dict[int, Completion]:
    """Decode until an answer has so many tokens; return those that ended."""
    done: dict[int, Completion] = {}
    while len(engine.partial_answer(id) or ()) < tokens:
        done |= {completion.id: completion for completion in engine.step()}
    return done


def last_state_error(
    engine: SglangEngine, policy: Path, request: Request, done: Completion
) -> float:
    """Return the largest relative error of the last states of an answer that has just ended."""
    text = torch.tensor([[*request.prompt, *done.tokens][:-1]])
    wanted = drafter_models.policy_states(policy, text)[0][0][:, -1]
    states = engine.hidden_states(done.id)[:, -1]
    assert states.shape == wanted.shape
    return ((states - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()


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


def check_adoption_in_mid_answer(engine: SglangEngine, policy: Path, drafter: Drafter) -> None:
    """Adopt a drafter where strategies take turns, and check that no answer changes."""
    submitted = requests(40, tokens=100)
    engine.submit(submitted)
    done = decode_until(engine, 0, 10)
    engine.adopt_drafter(FIRST, drafter)
    done |= finish(engine)
    check_greedy(policy, submitted, done)
    tallies = finish_tallies(engine)
    assert {NGRAM, CHAIN, Off()} <= {tally.strategy for tally in tallies}
    # all but the first token of each answer, which its prefill gains
    assert sum(tally.tokens for tally in tallies) == sum(len(d.tokens) - 1 for d in done.values())
    assert origins(done)["accepted"] > 300
    assert drafters(done) == {None, FIRST}


def check_rebuilt_cache(engine: SglangEngine, policy: Path, folder: Path, drafter: Drafter) -> None:
    """Decode with a drafter whose cache lapses before each use, and check its proposals."""
    engine.adopt_drafter(FIRST, drafter)
    known, prompts = len(proposals(folder)), random_prompts(48)
    submitted = [new_request(i, prompt, Sampling(), 100) for i, prompt in enumerate(prompts)]
    done = answers(engine, submitted)
    assert check_proposals(proposals(folder)[known:], submitted, done, drafter, policy) > 100
