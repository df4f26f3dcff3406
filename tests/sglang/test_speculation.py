"""SGLang speculates from n-grams at first, and with a drafter from the moment it is adopted."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.engine import drafter_models
from tests.engine.reference import GREEDY, answers, finish, new_request, random_prompts
from tests.sglang.speculating import (
    CHAIN,
    FIRST,
    NGRAM,
    SECOND,
    Memoryless,
    check_frequencies,
    check_greedy,
    check_proposals,
    check_rebuilt_cache,
    decode_until,
    drafters,
    draw,
    finish_tallies,
    origins,
    proposals,
    requests,
    start,
    swapped,
)
from tlt.base.strategies import Off
from tlt.engine.base import Completion
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.weight_parts_and_checksums import drafter_as_held
from tlt.engine.sglang.shared.scheduler_options import SchedulerOptions
from tlt.errors import ConfigError, RankError
from tlt.models.eagle_drafter import Drafter, new_drafter

pytestmark = pytest.mark.sglang


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
        done |= decode_until(engine, 7, tokens)
        if engine.drafter_version is None:
            engine.adopt_drafter(FIRST, fitted)
        else:
            engine.drop_drafter()
    done |= finish(engine)
    check_greedy(policy, submitted, done)
    assert {tally.strategy for tally in finish_tallies(engine)} == {Off(), CHAIN}


def test_first_drafter_is_adopted_in_mid_answer_and_guesses_as_if_always_there(
    engine: SglangEngine, policy: Path, folder: Path, fitted: Drafter
) -> None:
    submitted = requests(8, tokens=100)
    known = len(proposals(folder))
    engine.submit(submitted)
    assert not decode_until(engine, 7, 30)
    before = {request.id: engine.partial_answer(request.id) or [] for request in submitted}
    engine.adopt_drafter(FIRST, fitted)
    done = finish(engine)
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
    check_rebuilt_cache(guessing, policy, guesses, fitted)
    tallies = finish_tallies(guessing)
    plain = [tally for tally in tallies if tally.strategy == Off()]
    assert sum(tally.steps for tally in plain) >= 8
    # of keeping the cache up to date
    assert sum(tally.overhead for tally in plain) == 0.0
    assert sum(tally.steps for tally in tallies if tally.strategy == CHAIN) >= 8


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
    assert not decode_until(engine, 7, 20)
    engine.adopt_drafter(SECOND, fitted)
    done = finish(engine)
    check_greedy(policy, submitted, done)
    assert SECOND in drafters(done)


def test_holds_the_drafter_that_was_sent(engine: SglangEngine, fitted: Drafter) -> None:
    engine.adopt_drafter(FIRST, fitted)
    client = engine._client  # pyright: ignore[reportPrivateUsage]
    client.run(client.verify(drafter_as_held(fitted.state_dict()), "draft", "it"))
    changed = fitted.state_dict() | {"fc.weight": fitted.state_dict()["fc.weight"] * 1.001}
    with pytest.raises(RankError, match=r"after a fault SGLang holds another model\.fc\.weight"):
        client.run(client.verify(drafter_as_held(changed), "draft", "a fault"))


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
    with swapped(engine, policy, memoryless.weights):
        if speculates:
            engine.adopt_drafter(FIRST, memoryless.drafter)
        done = draw(engine, temperature)
    check_frequencies(done, memoryless.logits, temperature)
    accepted = origins(done).get("accepted", 0)
    assert accepted >= 3000 if speculates else accepted == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_follow_the_policy_where_n_grams_guess(
    guessing: SglangEngine, policy: Path, memoryless: Memoryless, temperature: float
) -> None:
    with swapped(guessing, policy, memoryless.weights):
        done = draw(guessing, temperature)
    check_frequencies(done, memoryless.logits, temperature)
    assert origins(done)["accepted"] >= 1000


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
