"""SGLang speculates from n-grams at first, and with a drafter from the moment it is adopted."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from tests.engine import drafter_models
from tests.engine.chi_square import p_value
from tests.engine.reference import GREEDY, answers, new_request, random_prompts
from tests.engine.test_sampled_distribution import TRIALS
from tests.sglang.speculating import (
    CHAIN,
    FIRST,
    NGRAM,
    SECOND,
    Memoryless,
    check_greedy,
    check_proposals,
    drafters,
    finish_tallies,
    origins,
    proposals,
    requests,
    start,
)
from tlt.base.id_types import PolicyVersion
from tlt.base.strategies import Off
from tlt.engine.base import Completion, Sampling
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.weight_parts_and_checksums import drafter_as_held
from tlt.engine.sglang.shared.scheduler_options import SchedulerOptions
from tlt.errors import ConfigError, RankError
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.eagle_drafter import Drafter, new_drafter

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_models.predictable_policy(tmp_path_factory.mktemp("policy") / "policy")


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def layout(request: pytest.FixtureRequest) -> drafter_models.Layout:
    return request.param


@pytest.fixture(scope="module")
def folder(layout: drafter_models.Layout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(layout)


@pytest.fixture(scope="module")
def engine(layout: drafter_models.Layout, policy: Path, folder: Path) -> Iterator[SglangEngine]:
    """Yield an engine that uses its drafter in every step, once it has one."""
    started = start(folder, policy, layout, [(CHAIN, 16)])
    yield started
    started.close()


@pytest.fixture(scope="module")
def guesses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guessing")


@pytest.fixture(scope="module")
def guessing(policy: Path, guesses: Path) -> Iterator[SglangEngine]:
    """Yield an engine that guesses from n-grams, and now and then with a drafter if it has one.

    A drafter's cache lapses before each time.
    """
    script = [(NGRAM, 40), (CHAIN, 8), (Off(), 32), (CHAIN, 8)]
    started = start(guesses, policy, "eagle", script)
    yield started
    started.close()


@pytest.fixture(scope="module")
def fitted(layout: drafter_models.Layout, policy: Path) -> Drafter:
    return drafter_models.fitted_drafter(layout, policy)


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest) -> None:
    for name in {"engine", "guessing"}.intersection(request.fixturenames):
        started: SglangEngine = request.getfixturevalue(name)
        started.drop_drafter()
        finish_tallies(started)


def test_guesses_from_siblings_before_there_is_a_drafter(
    guessing: SglangEngine, policy: Path
) -> None:
    first, again = requests(), requests()
    answers(guessing, first)
    done = answers(guessing, again)
    check_greedy(policy, again, done)
    assert origins(done)["accepted"] > 100
    assert drafters(done) == {None}


def test_changes_of_strategy_change_no_answer(
    engine: SglangEngine, policy: Path, fitted: Drafter
) -> None:
    submitted = requests(8, tokens=100)
    engine.submit(submitted)
    done: dict[int, Completion] = {}
    for tokens in (10, 30, 50):
        while len(engine.partial_answer(7) or ()) < tokens:
            done |= {completion.id: completion for completion in engine.step()}
        if engine.drafter_version is None:
            engine.adopt_drafter(FIRST, fitted)
        else:
            engine.drop_drafter()
    while engine.running:
        done |= {completion.id: completion for completion in engine.step()}
    check_greedy(policy, submitted, done)
    assert {tally.strategy for tally in finish_tallies(engine)} == {Off(), CHAIN}


def test_first_drafter_is_adopted_in_mid_answer_and_guesses_as_if_always_there(
    engine: SglangEngine, policy: Path, folder: Path, fitted: Drafter
) -> None:
    submitted = requests(8, tokens=100)
    known = len(proposals(folder))
    engine.submit(submitted)
    done: dict[int, Completion] = {}
    while len(engine.partial_answer(7) or ()) < 30:
        done |= {completion.id: completion for completion in engine.step()}
    assert not done
    before = {request.id: engine.partial_answer(request.id) or [] for request in submitted}
    engine.adopt_drafter(FIRST, fitted)
    while engine.running:
        done |= {completion.id: completion for completion in engine.step()}
    check_greedy(policy, submitted, done)
    for id, tokens in before.items():
        assert done[id].tokens[: len(tokens)] == tokens
    assert {tally.drafter for tally in finish_tallies(engine)} == {None, FIRST}
    checked = check_proposals(proposals(folder)[known:], submitted, done, fitted, policy)
    assert checked > 20
    assert drafters(done) == {None, FIRST}


def test_a_cache_that_lapsed_is_rebuilt(
    guessing: SglangEngine,
    policy: Path,
    guesses: Path,
    layout: drafter_models.Layout,
    fitted: Drafter,
) -> None:
    if layout != "eagle":
        pytest.skip("the other server has one drafter of each layout in turn")
    guessing.adopt_drafter(FIRST, fitted)
    known = len(proposals(guesses))
    submitted = [
        new_request(i, prompt, Sampling(), 100) for i, prompt in enumerate(random_prompts(48))
    ]
    done = answers(guessing, submitted)
    tallies = finish_tallies(guessing)
    plain = [tally for tally in tallies if tally.strategy == Off()]
    assert sum(tally.steps for tally in plain) >= 8
    # of keeping the cache up to date
    assert sum(tally.overhead for tally in plain) == 0.0
    assert sum(tally.steps for tally in tallies if tally.strategy == CHAIN) >= 8
    assert check_proposals(proposals(guesses)[known:], submitted, done, fitted, policy) > 100


def test_greedy_answers_stay_while_n_grams_and_drafter_take_turns(
    guessing: SglangEngine, policy: Path, layout: drafter_models.Layout, fitted: Drafter
) -> None:
    if layout != "eagle":
        pytest.skip("the other server has one drafter of each layout in turn")
    guessing.adopt_drafter(FIRST, fitted)
    submitted = [new_request(i, prompt, GREEDY, 100) for i, prompt in enumerate(random_prompts(80))]
    check_greedy(policy, submitted, answers(guessing, submitted))
    strategies = {tally.strategy for tally in finish_tallies(guessing)}
    assert {NGRAM, CHAIN} <= strategies


def test_another_drafter_takes_over_in_mid_answer(
    engine: SglangEngine, policy: Path, layout: drafter_models.Layout, fitted: Drafter
) -> None:
    engine.adopt_drafter(FIRST, drafter_models.random_drafter(layout, seed=9))
    submitted = requests(8, tokens=100)
    engine.submit(submitted)
    while len(engine.partial_answer(7) or ()) < 20:
        engine.step()
    engine.adopt_drafter(SECOND, fitted)
    done: dict[int, Completion] = {}
    while engine.running:
        done |= {completion.id: completion for completion in engine.step()}
    check_greedy(policy, submitted, done)
    assert SECOND in drafters(done)


def test_holds_the_drafter_that_was_sent(engine: SglangEngine, fitted: Drafter) -> None:
    engine.adopt_drafter(FIRST, fitted)
    client = engine._client  # pyright: ignore[reportPrivateUsage]
    client.run(client.verify(drafter_as_held(fitted.state_dict()), "draft", "it"))
    changed = fitted.state_dict() | {"fc.weight": fitted.state_dict()["fc.weight"] * 1.001}
    with pytest.raises(RankError, match=r"after a fault SGLang holds another model\.fc\.weight"):
        client.run(client.verify(drafter_as_held(changed), "draft", "a fault"))


@pytest.fixture(scope="module")
def memoryless(tmp_path_factory: pytest.TempPathFactory) -> Memoryless:
    logits = 1.5 * torch.randn(97, generator=torch.Generator().manual_seed(3))
    # drafts of this token are often right
    logits[5] = 5.0
    folder = tmp_path_factory.mktemp("memoryless")
    state = drafter_models.memoryless_policy(folder / "policy", logits)
    weights = dict(load_decoder(folder / "policy").weights)
    return Memoryless(logits, weights, drafter_models.constant_drafter(state))


@contextmanager
def swapped(engine: SglangEngine, policy: Path, memoryless: Memoryless) -> Generator[None]:
    """Decode with the memoryless policy, and then with the other again."""
    engine.swap_weights(PolicyVersion(engine.version + 1), memoryless.weights)
    try:
        yield
    finally:
        weights = dict(load_decoder(policy).weights)
        engine.swap_weights(PolicyVersion(engine.version + 1), weights)


def check_frequencies(
    engine: SglangEngine, memoryless: Memoryless, temperature: float, least_accepted: int
) -> None:
    """Draw tokens that depend on no others, most of them in decode steps."""
    tokens = 98
    count = -(-TRIALS["sglang"].draws // tokens)
    prompts = random_prompts(1, shortest=5)
    done = answers(
        engine,
        [
            new_request(i, prompts[0], Sampling(temperature=temperature), tokens)
            for i in range(count)
        ],
    )
    drawn = torch.tensor([token for completion in done.values() for token in completion.tokens])
    expected = (memoryless.logits / temperature).softmax(-1)
    assert p_value(drawn.bincount(minlength=97), expected) > TRIALS["sglang"].significance
    accepted = origins(done).get("accepted", 0)
    assert accepted >= least_accepted
    assert (accepted == 0) == (least_accepted == 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("speculates", [False, True], ids=["off", "draft"])
def test_tokens_follow_the_policy(
    engine: SglangEngine,
    policy: Path,
    layout: drafter_models.Layout,
    memoryless: Memoryless,
    speculates: bool,
    temperature: float,
) -> None:
    if layout != "eagle":
        pytest.skip("verification doesn't depend on the drafter's layout")
    with swapped(engine, policy, memoryless):
        if speculates:
            engine.adopt_drafter(FIRST, memoryless.drafter)
        check_frequencies(engine, memoryless, temperature, 3000 if speculates else 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_follow_the_policy_where_n_grams_guess(
    guessing: SglangEngine, policy: Path, memoryless: Memoryless, temperature: float
) -> None:
    with swapped(guessing, policy, memoryless):
        check_frequencies(guessing, memoryless, temperature, 1000)


def test_refused_drafter_leaves_the_last_good_one(
    engine: SglangEngine, policy: Path, fitted: Drafter
) -> None:
    engine.adopt_drafter(FIRST, fitted)
    other = new_drafter(msgspec.structs.replace(fitted.config, vocabulary=50))
    with pytest.raises(ConfigError, match="does not fit the policy"):
        engine.adopt_drafter(SECOND, other)
    assert engine.drafter_version == FIRST
    submitted = requests(4)
    done = answers(engine, submitted)
    check_greedy(policy, submitted, done)
    assert drafters(done) <= {None, FIRST}


def test_reads_texts_as_if_it_had_decoded_them(
    engine: SglangEngine, policy: Path, layout: drafter_models.Layout
) -> None:
    text = torch.randint(0, 97, (1, 40)).tolist()[0]
    states = engine.compute_hidden_states(text, lambda: None)
    expected, _ = drafter_models.policy_states(policy, torch.tensor([text[:-1]]))
    layers = [layer - 1 for layer in drafter_models.captured(layout)]
    wanted = expected[0][:, layers]
    assert ((states - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 1e-5


def test_reading_ends_at_an_interrupt(engine: SglangEngine) -> None:
    class Interrupt(Exception):
        pass

    def interrupt() -> None:
        raise Interrupt

    text = torch.randint(0, 97, (1, 100)).tolist()[0]
    # it may be done before the first check
    for _ in range(20):
        try:
            engine.compute_hidden_states(text, interrupt)
        except Interrupt:
            break
    else:
        raise AssertionError("no interrupt reached the reading")
    assert len(engine.compute_hidden_states(text, lambda: None)) == 99


def test_fails_by_name_if_our_worker_is_not_in_place(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: drafter_models.Layout
) -> None:
    if layout != "eagle":
        pytest.skip("the handshake doesn't depend on the drafter's layout")

    whole = SchedulerOptions.environment

    def without_speculation(options: SchedulerOptions) -> dict[str, str]:
        return whole(msgspec.structs.replace(options, speculation=None))

    monkeypatch.setattr(SchedulerOptions, "environment", without_speculation)
    with pytest.raises(RankError, match="worker is not in place in its process"):
        start(tmp_path, policy, layout, [(CHAIN, 16)])
