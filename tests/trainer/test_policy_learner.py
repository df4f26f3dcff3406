import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from tests.trainer import reference
from tests.trainer.models import (
    CPU,
    VOCABULARY,
    copies,
    learner,
    never_interrupt,
    samples,
    save_family,
    save_llama,
    share,
    spec,
    whole,
)
from tlt.errors import ConfigError, RankError, UnsupportedModel
from tlt.trainer.policy.model.micro_batches import PolicySample
from tlt.trainer.policy.policy_learner import PolicyLearner


@pytest.mark.parametrize("averaging", ["token", "sequence"])
@pytest.mark.parametrize(("kl_coefficient", "entropy_coefficient"), [(0, 0), (0.3, 0), (0, 0.2)])
def test_several_minibatches_follow_the_naive_update(
    model_dir: str, averaging: str, kl_coefficient: float, entropy_coefficient: float
):
    changes = {
        "averaging": averaging,
        "kl_coefficient": kl_coefficient,
        "entropy_coefficient": entropy_coefficient,
        "learning_rate": 2e-3,
        "gradient_clip": 0.5,
    }
    parts = [samples(5, seed=1), samples(4, seed=2), samples(6, seed=3)]
    learns = learner(model_dir, **changes)
    metrics = learns.update(0, [whole(part) for part in parts], None, never_interrupt)
    model, losses, norms = reference.update(spec(**changes), model_dir, parts, 2e-3)
    assert metrics.loss == pytest.approx(sum(losses) / 3, rel=1e-3, abs=1e-5)
    assert metrics.gradient_norm == pytest.approx(sum(norms) / 3, rel=1e-3)
    theirs = dict(model.named_parameters())
    for name, tensor in learns.weights().items():
        torch.testing.assert_close(tensor, theirs[name].float(), rtol=0, atol=2e-4)


def test_epochs_keep_the_old_logprobs_of_the_first(model_dir: str):
    """The naive update makes the second epoch's steps with old log-probs from before the first."""
    parts = [samples(5, seed=1), samples(4, seed=2)]
    changes = {"learning_rate": 2e-3, "clip_low": 0.02, "clip_high": 0.02}
    learns = learner(model_dir, epochs=2, **changes)
    metrics = learns.update(0, [whole(part) for part in parts], None, never_interrupt)
    model, losses, _ = reference.update(spec(**changes), model_dir, parts * 2, 2e-3)
    assert metrics.optimiser_steps == 4
    assert metrics.samples == 9
    assert metrics.clipped_low + metrics.clipped_high > 0
    assert metrics.loss == pytest.approx(sum(losses) / 4, rel=1e-3, abs=1e-5)
    theirs = dict(model.named_parameters())
    for name, tensor in learns.weights().items():
        torch.testing.assert_close(tensor, theirs[name].float(), rtol=0, atol=2e-4)


def test_agreeing_sampler_saves_the_pass_for_old_logprobs(model_dir: str):
    parts = [whole(reference.drawn_by(model_dir, 4, seed)) for seed in range(3)]
    calls: list[None] = []
    saving = learner(model_dir, microbatch_tokens=1)
    saving.update(0, parts, None, lambda: calls.append(None))
    assert len(calls) == 3 * 4 + 2
    thorough = learner(model_dir, microbatch_tokens=1, old_logprobs="learner")
    thorough.update(0, parts, None, lambda: calls.append(None))
    assert len(calls) == 3 * 4 + 2 + 5 * 4
    for name, tensor in saving.weights().items():
        torch.testing.assert_close(tensor, thorough.weights()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gap", [0.01, -0.01, float("nan")])
def test_one_differing_token_causes_the_pass_for_old_logprobs(model_dir: str, gap: float):
    first, second = reference.drawn_by(model_dir, 4, 1), reference.drawn_by(model_dir, 3, 2)
    odd = replace(first[2], logprobs=(first[2].logprobs[0] + gap, *first[2].logprobs[1:]))
    parts = [whole([*first[:2], odd, first[3]]), whole(second)]
    calls: list[None] = []
    learns = learner(model_dir, microbatch_tokens=1)
    with contextlib.suppress(RankError):
        learns.update(0, parts, None, lambda: calls.append(None))
    assert len(calls) >= 4 + 3


def test_log_probs_of_another_policys_answer_are_not_believed(model_dir: str):
    """They may agree by chance; one answer in the minibatches that aren't compared is enough."""
    parts = [reference.drawn_by(model_dir, 4, seed) for seed in range(3)]
    parts[2][3] = replace(parts[2][3], drawn_by_policy=False)
    calls: list[None] = []
    learns = learner(model_dir, microbatch_tokens=1)
    learns.update(0, [whole(part) for part in parts], None, lambda: calls.append(None))
    assert len(calls) == 3 * 4 + 2 * 4


def test_finds_a_stale_minibatch_behind_a_fresh_one(model_dir: str):
    fresh, other = (reference.drawn_by(model_dir, 4, seed) for seed in (1, 2))
    stale = [replace(s, logprobs=tuple(value - 3 for value in s.logprobs)) for s in other]
    parts = [whole(fresh), whole(stale)]
    found = learner(model_dir).update(0, parts, None, never_interrupt)
    thorough = learner(model_dir, old_logprobs="learner").update(0, parts, None, never_interrupt)
    assert found == thorough
    assert found.importance_truncated > 0.3


def test_mismatch_is_a_mean_over_compared_tokens_only(model_dir: str):
    def shifted(seed: int) -> list[PolicySample]:
        drawn = reference.drawn_by(model_dir, 9, seed)
        return [replace(s, logprobs=tuple(value - 5e-4 for value in s.logprobs)) for s in drawn]

    calls: list[None] = []
    parts = [whole(shifted(seed)) for seed in (1, 2, 3)]
    learns = learner(model_dir, microbatch_tokens=1)
    metrics = learns.update(0, parts, None, lambda: calls.append(None))
    # two of nine samples of each later minibatch were compared
    assert len(calls) == 3 * 9 + 2 * 2
    assert metrics.sampling_kl == pytest.approx(5e-4**2 / 2, rel=0.05)


def test_metrics_are_means_over_all_tokens(model_dir: str):
    chosen = samples(8)
    metrics = learner(model_dir, kl_coefficient=0.1).update(
        0, [whole(chosen)], None, never_interrupt
    )
    model = reference.load(model_dir)
    with torch.no_grad():
        scored = [reference.logprobs(model, sample) for sample in chosen]
    gap = torch.cat(
        [old - torch.tensor(s.logprobs) for (old, _), s in zip(scored, chosen, strict=True)]
    )
    assert metrics.samples == 8
    assert metrics.tokens == len(gap)
    assert metrics.learning_rate == 1e-2
    assert metrics.entropy == pytest.approx(
        torch.cat([e for _, e in scored]).mean().item(), rel=1e-4
    )
    assert metrics.sampling_kl == pytest.approx((gap.exp() - 1 - gap).mean().item(), rel=1e-4)
    assert metrics.importance_truncated == pytest.approx((gap.exp() > 2).double().mean().item())
    assert metrics.reference_kl == pytest.approx(0.0, abs=1e-6)
    assert metrics.clipped_low == metrics.clipped_high == 0.0


def test_far_step_is_clipped_in_the_next_minibatch(model_dir: str):
    again = whole(samples(8))
    metrics = learner(model_dir, learning_rate=0.1).update(0, [again, again], None, never_interrupt)
    assert metrics.clipped_low > 0
    assert metrics.clipped_high > 0


def test_updates_make_a_rewarded_token_likelier(model_dir: str):
    def answer(token: int, advantage: float) -> PolicySample:
        return PolicySample(
            prompt=(1, 2, 3),
            completion=(token,),
            logprobs=(-3.0,),
            temperature=1.0,
            advantage=advantage,
        )

    learns = learner(model_dir, learning_rate=3e-3)
    group = [answer(7, 1.0), answer(8, -1.0)]

    def probability(token: int) -> float:
        model = reference.load(model_dir)
        model.load_state_dict(learns.weights(), strict=False)
        model.tie_weights()
        with torch.no_grad():
            return reference.logprobs(model, answer(token, 0.0))[0].exp().item()

    before = probability(7), probability(8)
    for step in range(5):
        learns.update(step, [whole(group)], None, never_interrupt)
    assert probability(7) > 1.5 * before[0]
    assert probability(8) < before[1]


def test_update_without_samples_makes_no_step(model_dir: str):
    learns = learner(model_dir)
    before = copies(learns.weights())
    metrics = learns.update(0, [share([], []), share([], [])], None, never_interrupt)
    assert (metrics.tokens, metrics.samples, metrics.loss, metrics.gradient_norm) == (
        0,
        0,
        0.0,
        0.0,
    )
    assert (metrics.learning_rate, metrics.entropy, metrics.reference_kl) == (0.0, 0.0, None)
    assert learns.optimiser_state()["step"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in learns.weights().items())


def test_minibatch_without_samples_changes_nothing(model_dir: str):
    with_gap, without = learner(model_dir), learner(model_dir)
    first, second = whole(samples(3)), whole(samples(3, seed=1))
    a = with_gap.update(0, [first, share([], []), second], None, never_interrupt)
    b = without.update(0, [first, second], None, never_interrupt)
    assert a == b
    assert with_gap.optimiser_state()["step"] == 2


def test_between_is_called_after_every_microbatch_and_may_abandon(model_dir: str):
    learns = learner(model_dir, microbatch_tokens=1)
    calls: list[None] = []
    parts = [whole(samples(3)), whole(samples(4, seed=1))]
    learns.update(0, parts, None, lambda: calls.append(None))
    # the second minibatch is scored once more, before the first step
    assert len(calls) == 3 + 4 + 4

    class Abandoned(Exception):
        pass

    def abandon() -> None:
        raise Abandoned

    with pytest.raises(Abandoned):
        learns.update(1, parts, None, abandon)
    saved = copies(learns.weights())
    learns.load_weights(saved)
    assert learns.update(1, parts, None, never_interrupt).samples == 7


def test_saved_state_continues_to_the_bit(model_dir: str, tmp_path: Path):
    first = learner(model_dir)
    first.update(0, [whole(samples(5)), whole(samples(5, seed=1))], None, never_interrupt)
    save_file(first.weights(), tmp_path / "weights.safetensors")
    save_file(first.optimiser_state(), tmp_path / "optimiser.safetensors")
    second = learner(model_dir)
    second.update(0, [whole(samples(2, seed=9))], None, never_interrupt)
    second.load_weights(load_file(tmp_path / "weights.safetensors"))
    second.load_optimiser_state(load_file(tmp_path / "optimiser.safetensors"))
    for learns in (first, second):
        learns.update(1, [whole(samples(6, seed=2))], None, never_interrupt)
    assert first.weights().keys() == second.weights().keys()
    for a, b in (
        (first.weights(), second.weights()),
        (first.optimiser_state(), second.optimiser_state()),
    ):
        assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_loading_the_initial_state_resets_the_optimiser(model_dir: str):
    learns = learner(model_dir)
    untouched = copies(learns.optimiser_state())
    learns.update(0, [whole(samples(2))], None, never_interrupt)
    learns.load_optimiser_state(untouched)
    assert learns.optimiser_state().keys() == {"step"}


def test_weights_have_the_names_of_the_safetensors_file(model_dir: str):
    with safe_open(Path(model_dir) / "model.safetensors", framework="pt") as file:
        assert set(learner(model_dir).weights()) == set(file.keys())


def test_untied_head_has_its_own_name(tmp_path: Path):
    learns = learner(save_llama(tmp_path, tie_word_embeddings=False))
    assert "lm_head.weight" in learns.weights()


def test_loads_weights_that_list_a_tied_head_twice(model_dir: str, fresh_dir: str):
    learns = learner(model_dir)
    model = AutoModelForCausalLM.from_pretrained(fresh_dir)
    learns.load_weights(model.state_dict())
    theirs = dict(model.named_parameters())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in learns.weights().items())


def test_refuses_weights_of_another_model(model_dir: str):
    learns = learner(model_dir)
    weights = copies(learns.weights())
    lost = weights.pop("model.norm.weight")
    with pytest.raises(ConfigError, match=r"lacks model\.norm\.weight"):
        learns.load_weights(weights)
    with pytest.raises(ConfigError, match="shape"):
        learns.load_weights(weights | {"model.norm.weight": lost[:-1]})


def test_infinite_gradient_leaves_the_weights(model_dir: str):
    learns = learner(model_dir)
    before = copies(learns.weights())
    broken = replace(samples(1)[0], advantage=float("nan"))
    metrics = learns.update(0, [whole([broken])], None, never_interrupt)
    assert (metrics.optimiser_steps, metrics.skipped_steps) == (0, 1)
    assert metrics.gradient_norm == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in learns.weights().items())


def test_a_step_after_a_skipped_one_is_that_of_a_learner_that_skipped_nothing(model_dir: str):
    broken = replace(samples(1)[0], advantage=float("inf"))
    one, other = learner(model_dir), learner(model_dir)
    one.update(0, [whole([broken])], None, never_interrupt)
    metrics = one.update(1, [whole(samples(4))], None, never_interrupt)
    other.update(1, [whole(samples(4))], None, never_interrupt)
    assert (metrics.optimiser_steps, metrics.skipped_steps) == (1, 0)
    theirs = other.weights()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.weights().items())


def test_refuses_a_sample_beyond_the_context(model_dir: str):
    learns = PolicyLearner(model_dir, spec(), 10, CPU)
    long = PolicySample(
        prompt=(1,) * 5, completion=(2,) * 6, logprobs=(-1.0,) * 6, temperature=1.0, advantage=1.0
    )
    with pytest.raises(ConfigError, match="context of 10"):
        learns.update(0, [whole([long])], None, never_interrupt)


def test_refuses_a_token_beyond_the_vocabulary(model_dir: str):
    odd = replace(samples(1)[0], prompt=(VOCABULARY,))
    with pytest.raises(ConfigError, match="vocabulary"):
        learner(model_dir).update(0, [whole([odd])], None, never_interrupt)


def test_refuses_a_model_that_caps_its_logits(tmp_path: Path):
    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCABULARY,
        final_logit_softcapping=0.5,
        initializer_range=0.5,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="more than a projection"):
        learner(str(tmp_path))


def test_refuses_a_row_dependent_rope_beyond_its_steady_length(tmp_path: Path):
    folder = save_family(
        tmp_path,
        "phi3",
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    )
    with pytest.raises(UnsupportedModel, match="max_context to 16"):
        PolicyLearner(folder, spec(), None, CPU)
    PolicyLearner(folder, spec(), 16, CPU)


def test_refuses_a_folder_without_a_model(tmp_path: Path):
    with pytest.raises(UnsupportedModel, match="not a causal language model"):
        learner(str(tmp_path))
