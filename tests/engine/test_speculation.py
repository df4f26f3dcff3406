"""Speculation changes the speed of decoding, never the tokens."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch

from tests.engine import drafter_models
from tests.engine.chi_square import p_value, power
from tests.engine.recording_policy import RecordingPolicy
from tests.engine.reference import (
    answers,
    forced_logits,
    gap_at_the_fork,
    logprobs_of,
    new_request,
    random_prompts,
    show,
)
from tests.engine.test_reproducible import TIE
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Draft, Ngram, Off, Strategy
from tlt.engine.base import Completion, Request, Sampling
from tlt.engine.native import NativeEngine, decode_attention_kernels
from tlt.engine.native.running_batch_tensors import StepOutcome
from tlt.engine.native.speculation_controller import count_drafts
from tlt.errors import ConfigError
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.eagle_drafter import Drafter, new_drafter
from tlt.models.rope import PlainRope
from tlt.protocol.refs import OriginSpan

ARMS: tuple[Strategy, ...] = (
    Off(),
    Draft(depth=1),
    Draft(depth=3),
    Draft(depth=6, noise=False),
    Ngram(tokens=5),
)
FIRST = DrafterVersion(1)
# reveals a total variation of 0.05 with a power of 0.95
DRAWS = 7000


def engine(
    policy: Path,
    drafter: Drafter,
    strategy: Strategy | None = None,
    slots: int = 4,
    dtype: torch.dtype = torch.float64,
) -> NativeEngine:
    model = load_decoder(policy, dtype)
    layers = range(1, model.config.layers + 1)
    device, version = torch.device("cpu"), PolicyVersion(0)
    made = NativeEngine(model, show, slots, 128, device, version, layers, ARMS)
    made.speculation.adopt_drafter(FIRST, drafter)
    if strategy is not None:
        made.speculation.set_strategy(strategy)
    return made


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_models.predictable_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def drafter(request: pytest.FixtureRequest, policy: Path) -> Drafter:
    return drafter_models.fitted_drafter(request.param, policy)


@pytest.fixture(scope="module")
def eagle(policy: Path) -> Drafter:
    return drafter_models.fitted_drafter("eagle", policy)


def requests(count: int = 48, sampling: Sampling | None = None, tokens: int = 40) -> list[Request]:
    """Make groups of four, one of whose requests has a stop string."""
    drawn, prompts = sampling or Sampling(), random_prompts(count // 4)
    stops = [("7 3",) if i % 4 == 3 else () for i in range(count)]
    return [
        new_request(
            i, prompts[i // 4], drawn, 2 + i % tokens, stop_tokens=(4, 9), stop_strings=stops[i]
        )
        for i in range(count)
    ]


def same(done: dict[int, Completion], plain: dict[int, Completion]) -> bool:
    return all(
        done[i].tokens == plain[i].tokens and done[i].stop == plain[i].stop for i in plain
    ) and set(done) == set(plain)


def accept_length(done: dict[int, Completion]) -> float:
    tokens = sum(len(c.tokens) for c in done.values())
    kept = sum(
        span.tokens for c in done.values() for span in c.origins if span.origin == "accepted"
    )
    return tokens / (tokens - kept)


# float32 uses the C kernel, float64 uses torch
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("strategy", ARMS[1:])
def test_every_strategy_gives_the_same_tokens(
    policy: Path, drafter: Drafter, strategy: Strategy, dtype: torch.dtype
) -> None:
    batch = requests()
    plain = answers(engine(policy, drafter, dtype=dtype), batch)
    done = answers(engine(policy, drafter, strategy, dtype=dtype), batch)
    assert same(done, plain)
    assert accept_length(done) > (1.5 if isinstance(strategy, Draft) else 1)
    for id, completion in done.items():
        expected = forced_logits(policy, batch[id].prompt, completion.tokens)
        logprobs = logprobs_of(expected, completion.tokens, 1.0)
        assert completion.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)


@pytest.mark.parametrize("prompt", [1, 30])
def test_a_drafter_proposes_the_same_with_and_without_the_c_kernel(
    policy: Path, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, prompt: int
) -> None:
    """Prompts include one of a single token and a long one."""
    batch = [*requests(), new_request(48, range(3, 3 + prompt), Sampling(), 40)]

    def written() -> dict[int, tuple[Sequence[int], Sequence[OriginSpan]]]:
        made = engine(policy, drafter, Draft(depth=4), dtype=torch.float32)
        return {i: (done.tokens, done.origins) for i, done in answers(made, batch).items()}

    compiled = written()
    monkeypatch.setattr(decode_attention_kernels, "kernel", lambda: None)
    assert written() == compiled


@pytest.mark.parametrize("strategy", ARMS[1:])
def test_logprobs_are_the_policys_at_another_temperature(
    policy: Path, eagle: Drafter, strategy: Strategy
) -> None:
    batch = requests(24, Sampling(temperature=0.5, top_k=9))
    done = answers(engine(policy, eagle, strategy, dtype=torch.float32), batch)
    for id, completion in done.items():
        expected = forced_logits(policy, batch[id].prompt, completion.tokens)
        logprobs = logprobs_of(expected, completion.tokens, 0.5)
        assert completion.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)


def switching(
    made: NativeEngine, batch: Sequence[Request], drafters: Sequence[Drafter]
) -> dict[int, Completion]:
    """Decode with a random strategy at each step, and sometimes another drafter."""
    dice = Random(3)
    done: dict[int, Completion] = {}
    made.submit(batch)
    while made.running:
        made.speculation.set_strategy(dice.choice(ARMS))
        if dice.random() < 0.1:
            made.speculation.adopt_drafter(DrafterVersion(dice.randrange(9)), dice.choice(drafters))
        done |= {completion.id: completion for completion in made.step()}
    return done


def test_strategies_and_drafters_may_change_at_any_step(policy: Path, drafter: Drafter) -> None:
    batch = requests()
    plain = answers(engine(policy, drafter), batch)
    others = [
        drafter,
        drafter_models.random_drafter("eagle", 1),
        drafter_models.random_drafter("eagle3", 2),
    ]
    done = switching(engine(policy, drafter), batch, others)
    assert same(done, plain)
    assert accept_length(done) > 1.2
    for completion in done.values():
        spans = (completion.policies, completion.drafters, completion.origins, completion.batches)
        assert [sum(s.tokens for s in each) for each in spans] == [len(completion.tokens)] * 4


def test_any_policy_decodes_the_same(policy_folder: Path) -> None:
    """Random drafters are accepted where greedy answers repeat themselves."""
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(temperature=0.5, top_k=9)):
        batch = requests(32, sampling)
        theta = load_decoder(policy_folder).config.rope.theta
        drafters = [drafter_models.random_drafter(kind, 5, theta) for kind in ("eagle", "eagle3")]
        plain = answers(engine(policy_folder, drafters[0]), batch)
        assert same(switching(engine(policy_folder, drafters[1]), batch, drafters), plain)


def test_answers_differ_only_at_ties_in_float32(policy: Path, eagle: Drafter) -> None:
    batch = requests(400, tokens=12)
    plain = answers(engine(policy, eagle, slots=32, dtype=torch.float32), batch)
    done = switching(engine(policy, eagle, slots=32, dtype=torch.float32), batch, [eagle])
    different = [r for r in batch if done[r.id].tokens != plain[r.id].tokens]
    assert len(different) <= 1
    for r in different:
        assert gap_at_the_fork(policy, r, done[r.id].tokens, plain[r.id].tokens) < TIE


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5, top_k=20)])
@pytest.mark.parametrize("strategy", ARMS)
def test_second_tokens_follow_the_policy(
    policy: Path, eagle: Drafter, strategy: Strategy, sampling: Sampling
) -> None:
    """A second token is an accepted draft, or what the policy sampled instead."""
    prompt = random_prompts(1, shortest=5)[0]
    made = engine(policy, eagle, strategy, slots=64, dtype=torch.float32)
    done = answers(made, [new_request(i, prompt, sampling, max_new_tokens=2) for i in range(DRAWS)])
    counts = torch.tensor([c.tokens[1] for c in done.values()]).bincount(minlength=97)
    assert p_value(counts, second_tokens(policy, prompt, sampling), at_least=3) > 0.01


def test_second_tokens_suffice_to_find_a_difference() -> None:
    assert power(DRAWS, 0.05, 97, 0.01) >= 0.95


def second_tokens(policy: Path, prompt: Sequence[int], sampling: Sampling) -> torch.Tensor:
    """Return the probability of each second token."""
    first = filtered(forced_logits(policy, prompt, [0])[0], sampling)
    second = torch.stack(
        [filtered(forced_logits(policy, prompt, [t, 0])[1], sampling) for t in range(97)]
    )
    return first @ second


def filtered(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    scaled = logits / sampling.temperature
    if sampling.top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    return scaled.softmax(-1)


def test_a_stop_token_among_accepted_drafts_ends_the_answer(policy: Path, eagle: Drafter) -> None:
    prompt = random_prompts(1)[0]
    whole = answers(engine(policy, eagle), [new_request(0, prompt, Sampling(), 30)])[0].tokens
    for at in range(1, 12):
        stop = whole[at]
        first = whole.index(stop)
        made = engine(policy, eagle, Draft(depth=6))
        done = answers(made, [new_request(0, prompt, Sampling(), 30, stop_tokens=(stop,))])[0]
        assert (done.tokens, done.stop) == (whole[: first + 1], "stop")
        made = engine(policy, eagle, Draft(depth=6))
        done = answers(made, [new_request(0, prompt, Sampling(), at)])[0]
        assert (done.tokens, done.stop) == (whole[:at], "length")


def test_drafts_beyond_the_last_position_are_dropped(policy: Path, eagle: Drafter) -> None:
    batch = [new_request(i, prompt, Sampling(), 500) for i, prompt in enumerate(random_prompts(6))]
    plain = answers(engine(policy, eagle), batch)
    assert same(answers(engine(policy, eagle, Draft(depth=6)), batch), plain)
    assert all(len(c.tokens) + len(batch[i].prompt) == 128 for i, c in plain.items())


def test_ngrams_copy_a_finished_sibling(policy: Path, eagle: Drafter) -> None:
    prompt = random_prompts(1)[0]
    made = engine(policy, eagle, Ngram(tokens=5))
    first, again = (
        answers(made, [new_request(i, prompt, Sampling(), 40, member=1)]) for i in range(2)
    )
    assert first[0].tokens == again[1].tokens
    assert accept_length(again) > 3


def test_ngrams_copy_an_indexed_answer(policy: Path, eagle: Drafter) -> None:
    prompt = random_prompts(1)[0]
    batch = [new_request(0, prompt, Sampling(), 40)]
    plain = answers(engine(policy, eagle), batch)
    made = engine(policy, eagle, Ngram(tokens=5))
    made.index_answer(prompt, plain[0].tokens)
    done = answers(made, batch)
    assert same(done, plain)
    assert accept_length(done) > 3


def test_tokens_follow_new_weights_with_an_old_drafter(policy: Path, next_folder: Path) -> None:
    """No drafts are accepted, so all strategies swap weights at the same token."""
    batch = [new_request(i, prompt, Sampling(), 30) for i, prompt in enumerate(random_prompts(12))]
    untrained = drafter_models.random_drafter("eagle", 1)
    weights = load_decoder(next_folder, torch.float64).weights
    later = dict(load_decoder(policy, torch.float64).weights)
    later |= {name: w for name, w in weights.items() if "layers" in name}

    def swapping(strategy: Strategy) -> dict[int, Completion]:
        made = engine(policy, untrained, strategy, slots=12)
        made.submit(batch)
        done = {c.id: c for _ in range(9) for c in made.step()}
        made.swap_weights(PolicyVersion(1), later)
        while made.running:
            done |= {c.id: c for c in made.step()}
        return done

    plain, drafted = swapping(Off()), swapping(Draft(depth=3))
    unswapped = answers(engine(policy, untrained, Off()), batch)
    for id, completion in drafted.items():
        if any(span.origin == "accepted" for span in completion.origins):
            continue
        assert completion.tokens == plain[id].tokens
        assert completion.policies == plain[id].policies
        assert len(completion.policies) == 2
        assert completion.tokens != unswapped[id].tokens
    assert sum(c.tokens == plain[id].tokens for id, c in drafted.items()) >= 3


def test_cancelled_requests_return_their_partial_answers(policy: Path, eagle: Drafter) -> None:
    batch = requests()
    plain = answers(engine(policy, eagle), batch)
    made = engine(policy, eagle, Draft(depth=6))
    made.submit(batch)
    done: dict[int, Completion] = {}
    dice = Random(1)
    while made.running:
        made.cancel([dice.randrange(len(batch))])
        done |= {completion.id: completion for completion in made.step()}
    assert done.keys() == plain.keys()
    assert any(c.stop == "cancelled" and c.tokens for c in done.values())
    for id, completion in done.items():
        assert completion.tokens == plain[id].tokens[: len(completion.tokens)]


def test_a_missing_draft_counts_as_rejected(policy: Path, eagle: Drafter) -> None:
    made = engine(policy, eagle)
    policy_ = RecordingPolicy(Ngram(tokens=5))
    made.speculation.set_policy(lambda: policy_, 0)
    (done,) = answers(made, [new_request(0, (3, 1, 4), Sampling(), 12)]).values()
    kept = sum(sum(accepted) for _, accepted in policy_.observed)
    assert kept >= sum(span.tokens for span in done.origins if span.origin == "accepted")
    assert all(len(reached) == 5 for reached, _ in policy_.observed)
    assert ([1, 0, 0, 0, 0], [0] * 5) in policy_.observed


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"vocabulary": 50}, "its vocabulary is 50, the policy's 97"),
        ({"hidden": 32}, "its hidden is 32, the policy's 64"),
        ({"captured": (1,)}, r"it reads layers \[1\], and EAGLE's reads what follows the last one"),
        ({"layout": "eagle3", "captured": (1, 9)}, r"it reads layers \[1, 9\] of 3"),
        ({"layout": "eagle3", "captured": (1, 1)}, r"it reads layers \[1, 1\] of 3"),
        ({"kv_heads": 3}, "its 4 heads cannot share 3 keys"),
        ({"head_dim": 15}, "its heads are 15 wide"),
        ({"rope": PlainRope(theta=5.0)}, "its rope theta is 5, the policy's 10000"),
        (
            {"layout": "eagle3", "captured": (1, 2), "own_head": 98},
            r"d2t \[98\] names tokens beyond the vocabulary",
        ),
        (
            {"layout": "eagle3", "captured": (0, 2)},
            r"reads the states of layers \[0\], which this engine does not keep",
        ),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    policy: Path, eagle: Drafter, change: dict[str, object], complaint: str
) -> None:
    made = engine(policy, eagle, Draft(depth=3))
    config = msgspec.structs.replace(drafter_models.config("eagle"), **change)
    with pytest.raises(ConfigError, match=complaint):
        made.speculation.adopt_drafter(DrafterVersion(2), new_drafter(config))
    batch = requests(8)
    assert same(answers(made, batch), answers(engine(policy, eagle), batch))


def test_a_drafter_with_a_nan_is_refused(policy: Path, eagle: Drafter) -> None:
    broken = drafter_models.random_drafter("eagle", 1)
    with torch.no_grad():
        broken.fc.weight[3, 4] = torch.nan
    with pytest.raises(ConfigError, match=r"fc.weight \[64, 128\] holds what is not a number"):
        engine(policy, eagle).speculation.adopt_drafter(DrafterVersion(2), broken)


def test_refuses_more_drafts_than_there_is_room_for(policy: Path, eagle: Drafter) -> None:
    with pytest.raises(ConfigError, match="7 drafts per step, where 1 to 6 fit"):
        engine(policy, eagle, Draft(depth=7))
    with pytest.raises(ConfigError, match="0 drafts per step, where 1 to 6 fit"):
        engine(policy, eagle, Draft(depth=0))


def test_drafts_beyond_an_answers_end_are_not_counted() -> None:
    # rejected at the third; ended by a draft; ended by the policy's token; all accepted
    outcome = StepOutcome(kept=[3, 2, 3, 7], accepted=[2, 5, 2, 6], reasons={1: "stop", 2: "stop"})
    assert count_drafts(outcome) == ([3, 2, 3, 7], [2, 2, 2, 6])


def test_refuses_a_strategy_that_the_engine_was_not_made_for(policy: Path, eagle: Drafter) -> None:
    model = load_decoder(policy, torch.float64)
    device, version = torch.device("cpu"), PolicyVersion(0)
    made = NativeEngine(model, show, 4, 128, device, version, (), (Draft(depth=6),))
    with pytest.raises(ConfigError, match="n-grams are not among the strategies"):
        made.speculation.set_strategy(Ngram(tokens=4))
