"""Both drafter layouts load into SGLang, propose the same as our modules and change no answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from tests.engine import drafter_models
from tests.engine.chi_square import p_value
from tests.engine.reference import (
    GREEDY,
    answers,
    forced_logits,
    greedy_answer,
    logprobs_of,
    new_request,
    random_prompts,
)
from tests.engine.test_sampled_distribution import TRIALS
from tests.sglang.speculating import start_server, with_drafter
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Draft
from tlt.engine.base import Request, Sampling
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.sglang_client import SglangClient
from tlt.engine.sglang.shared.scheduler_options import Proposal
from tlt.engine.sglang.shared.shared_hidden_state_buffer import RequestName, Tap
from tlt.errors import ConfigError
from tlt.models.drafter_folder import load_drafter, save_drafter
from tlt.models.eagle_drafter import Drafter

pytestmark = pytest.mark.sglang

STEPS = 3
FIXED = Draft(depth=STEPS, noise=False)


class Speculating(NamedTuple):
    policy: Path
    drafter: Drafter
    server: SglangClient
    tap: Tap
    trace: Path

    def engine(self) -> SglangEngine:
        return SglangEngine(
            self.server,
            self.policy,
            self.tap,
            str,
            slots=8,
            max_context=128,
            version=PolicyVersion(0),
        )

    def proposals(self) -> list[Proposal]:
        lines = self.trace.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Proposal) for line in lines]


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Speculating]:
    folder = tmp_path_factory.mktemp(request.param)
    policy = drafter_models.predictable_policy(folder / "policy")
    drafter = drafter_models.random_drafter(request.param, seed=2)
    speculation = with_drafter(drafter, policy, folder, arms=(FIXED,), fixed=FIXED)
    server, tap = start_server(policy, folder, slots=32, **speculation)
    yield Speculating(policy, drafter, server, tap, folder / "proposals")
    server.close()


@pytest.fixture(scope="module")
def taught(started: Speculating) -> Drafter:
    return drafter_models.fitted_drafter(started.drafter.config.layout, started.policy)


@pytest.fixture
def fitted(started: Speculating, taught: Drafter) -> Iterator[Speculating]:
    """Give the server the fitted drafter for one test."""
    started.server.run(started.server.update_drafter(dict(taught.state_dict()), DrafterVersion(1)))
    yield started._replace(drafter=taught)
    first = dict(started.drafter.state_dict())
    started.server.run(started.server.update_drafter(first, DrafterVersion(2)))


def requests(sampling: Sampling) -> list[Request]:
    """Return more requests than there are slots, so that they join and leave."""
    prompts = random_prompts(20, shortest=2, longest=20)
    return [new_request(i, p, sampling, 5 + (7 * i) % 40) for i, p in enumerate(prompts)]


def check_proposals(speculating: Speculating, submitted: list[Request]) -> int:
    before = len(speculating.proposals())
    done = answers(speculating.engine(), submitted)
    made = speculating.proposals()[before:]
    # serial numbers follow the order of submission
    serials = [RequestName.read(proposal.name).serial for proposal in made]
    for proposal, serial in zip(made, serials, strict=True):
        id = serial - min(serials)
        text = [*submitted[id].prompt, *done[id].tokens][: proposal.seen + 1]
        if len(text) <= proposal.seen:
            continue  # proposed before the end of the answer was known
        assert proposal.tokens[0] == text[-1]
        expected = drafter_models.proposed(speculating.drafter, speculating.policy, text, STEPS)
        assert proposal.tokens[1:] == expected
    return len(made)


def test_random_drafter_proposes_the_same_as_our_module(started: Speculating) -> None:
    assert check_proposals(started, requests(GREEDY)[:8]) > 100


def test_fitted_drafter_proposes_the_same_and_is_mostly_accepted(fitted: Speculating) -> None:
    submitted = requests(GREEDY)
    passes = check_proposals(fitted, submitted)
    # the prefill yields the first token
    gained = sum(request.max_new_tokens - 1 for request in submitted)
    assert gained / passes >= 2


def test_greedy_answers_equal_those_of_the_policy(fitted: Speculating) -> None:
    submitted = requests(GREEDY)
    done = answers(fitted.engine(), submitted)
    for r in submitted:
        assert done[r.id].tokens == greedy_answer(fitted.policy, r.prompt, r.max_new_tokens)


def test_filters_hold_in_verification(fitted: Speculating) -> None:
    submitted = requests(Sampling(temperature=5.0, top_k=1, top_p=0.9))[:6]
    done = answers(fitted.engine(), submitted)
    for r in submitted:
        assert done[r.id].tokens == greedy_answer(fitted.policy, r.prompt, r.max_new_tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_forced_pass(fitted: Speculating, temperature: float) -> None:
    submitted = requests(Sampling(temperature=temperature))
    done = answers(fitted.engine(), submitted)
    for r in submitted:
        tokens = done[r.id].tokens
        expected = logprobs_of(forced_logits(fitted.policy, r.prompt, tokens), tokens, temperature)
        assert torch.tensor(done[r.id].logprobs) == pytest.approx(expected, abs=1e-4)


def test_states_equal_those_of_the_policy_at_every_position(fitted: Speculating) -> None:
    submitted = {r.id: r for r in requests(Sampling())}
    engine = fitted.engine()
    engine.submit(list(submitted.values()))
    layers = drafter_models.captured(fitted.drafter.config.layout)
    seen = 0
    while engine.running:
        for done in engine.step():
            text = [*submitted[done.id].prompt, *done.tokens]
            states = engine.hidden_states(done.id)
            expected, _ = drafter_models.policy_states(fitted.policy, torch.tensor([text[:-1]]))
            expected = expected[0][:, [layer - 1 for layer in layers]]
            assert states.shape == expected.shape
            assert ((states - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5
            seen += len(states)
    assert seen > 400


def test_drawn_pairs_follow_the_policy(fitted: Speculating) -> None:
    """The second token is an accepted draft or was drawn in verification, after the first."""
    if fitted.drafter.config.layout == "eagle":
        pytest.skip("verification doesn't depend on the drafter, and the draws take half a minute")
    prompt = random_prompts(1, shortest=5)[0]
    submitted = [
        new_request(i, prompt, Sampling(), max_new_tokens=3) for i in range(TRIALS["sglang"].draws)
    ]
    done = answers(fitted.engine(), submitted)
    counts = torch.tensor([c.tokens[1] for c in done.values()]).bincount(minlength=97)
    first = forced_logits(fitted.policy, prompt, [0])[0].softmax(-1)
    second = torch.stack(
        [forced_logits(fitted.policy, prompt, [token, 0])[1].softmax(-1) for token in range(97)]
    )
    assert p_value(counts, first @ second) > TRIALS["sglang"].significance


def test_pushes_only_the_weights_of_the_drafter(fitted: Speculating) -> None:
    foreign = {"embed_tokens.weight": torch.zeros(97, 64)}
    with pytest.raises(ConfigError, match="no weight of the drafter's own"):
        fitted.server.run(fitted.server.update_drafter(foreign, DrafterVersion(3)))
    prompt = random_prompts(1, shortest=5)[0]
    done = answers(fitted.engine(), [new_request(0, prompt)])
    assert done[0].tokens == greedy_answer(fitted.policy, prompt, 20)


def test_loads_a_saved_drafter_unchanged(started: Speculating, tmp_path: Path) -> None:
    save_drafter(started.drafter, tmp_path)
    again = load_drafter(tmp_path, policy_layers=drafter_models.LAYERS)
    assert again.config == started.drafter.config
    for name, weight in started.drafter.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
