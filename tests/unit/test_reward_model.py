"""A reward model's score of an answer is the one that it gives that answer alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3ForSequenceClassification,
)

from tlt.errors import ConfigError
from tlt.rewards.kinds.reward_model import RewardModel
from tlt.rewards.process.request_scorer import load_scorer
from tlt.rewards.process.reward_pool import RewardPool
from tlt.rewards.reward_messages import ScoreRequest, ScoreResult
from tlt.spec.reward import RewardSpec

REASONER = Path(__file__).resolve().parents[2] / "examples" / "tiny_reasoner" / "model"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}({% else %}={% endif %}{{ m.content }}"
    "{% endfor %}<eos>"
)
PAD, EOS = 0, 1
CLASSES = {"llama": LlamaForSequenceClassification, "qwen3": Qwen3ForSequenceClassification}
PROMPTS = ["1+2", "10*(3+4)", "7", "1+1+1+1+1+1"]
ANSWERS = ["3", "#46", "so 7*8=56#56", "6+5"]


def save(folder: Path, family: str = "llama", template: bool = False, **changes: Any) -> Path:
    made = CLASSES.get(family, LlamaForCausalLM)
    torch.manual_seed(0)
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "num_labels": 1,
        "pad_token_id": None,
    }
    made(made.config_class(**settings | changes)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REASONER / name, folder)
    if template:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def model_of(folder: Path, **changes: Any) -> RewardModel:
    return RewardModel(RewardSpec(kind="model", path=str(folder), **changes))


def request(prompt: Any, answer: str) -> ScoreRequest:
    return ScoreRequest(completion=answer, answer=None, row={}, known={"prompt": prompt})


def rewards(model: RewardModel) -> list[float | None]:
    given = [request(prompt, answer) for prompt in PROMPTS for answer in ANSWERS]
    return [result.reward for result in model.score(given)]


def each_alone(folder: Path, texts: list[str], special: bool = True) -> list[float]:
    """Return what Transformers' own forward pass gives each text."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]
    with torch.inference_mode():
        return [model(torch.tensor([each])).logits.item() for each in ids]


def alone(folder: Path, text: str, special: bool = True) -> float:
    return each_alone(folder, [text], special)[0]


@pytest.mark.parametrize("pad", [None, -1, PAD, EOS], ids=["no pad", "pad -1", "pad", "pad is eos"])
@pytest.mark.parametrize("family", CLASSES)
def test_a_batch_gives_what_each_answer_gets_alone(
    tmp_path: Path, family: str, pad: int | None
) -> None:
    folder = save(tmp_path / "model", family, template=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
    for side in ("left", "right"):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": side}))
        texts = [f"({prompt}={answer}<eos>" for prompt in PROMPTS for answer in ANSWERS]
        expected = each_alone(folder, texts, special=False)
        assert max(expected) - min(expected) > 0.1
        for tokens in (1, 40, 4096):
            found = rewards(model_of(folder, batch_tokens=tokens))
            assert found == pytest.approx(expected, abs=1e-5)


def test_a_vocabulary_that_a_batch_uses_up_is_scored_one_by_one(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", vocab_size=21)
    every = "".join(t for t in AutoTokenizer.from_pretrained(folder).get_vocab())
    model = model_of(folder)
    results = model.score([request("1", "2"), request(every, "")])
    assert results[0].reward == pytest.approx(alone(folder, "12"), abs=1e-5)


def test_without_a_template_the_answer_follows_the_prompt(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    (result,) = model_of(folder).score([request("1+2=", "3")])
    assert result.reward == pytest.approx(alone(folder, "1+2=3"), abs=1e-5)
    (error,) = model_of(folder).score([request([{"role": "user", "content": "1"}], "3")])
    assert "no chat template, and the prompt is messages" in str(error.error)


def test_messages_go_through_the_models_own_template(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", template=True)
    said = [{"role": "user", "content": part} for part in ("1", "2")]
    (result,) = model_of(folder).score([request(said, "3")])
    assert result.reward == pytest.approx(alone(folder, "(1(2=3<eos>", False), abs=1e-5)


def test_a_long_conversation_loses_its_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "model")
    (result,) = model_of(folder, max_length=4).score([request("123456", "789")])
    assert result.reward == pytest.approx(alone(folder, "789"), abs=1e-5)
    assert "a conversation of 10 tokens loses its start: 4 are read" in capfd.readouterr().err


def test_a_sigmoid_lies_between_0_and_1(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    (plain,) = model_of(folder).score([request("1", "2")])
    (result,) = model_of(folder, sigmoid=True).score([request("1", "2")])
    assert plain.reward is not None
    assert result.reward == pytest.approx(torch.tensor(plain.reward).sigmoid().item())


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("llama", {"num_labels": 3}, "its model has 3 labels, and a reward model has one"),
        ("causal", {}, "LlamaForCausalLM generates text"),
    ],
)
def test_other_models_are_refused_before_they_are_loaded(
    tmp_path: Path, family: str, changes: dict[str, Any], complaint: str
) -> None:
    folder = save(tmp_path / "model", family, **changes)
    with pytest.raises(ConfigError, match=complaint):
        load_scorer(RewardSpec(kind="model", path=str(folder)))
    with pytest.raises(ConfigError, match="no such folder"):
        load_scorer(RewardSpec(kind="model", path=str(tmp_path / "other")))


def test_a_folder_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "causal")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "reward"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"its weights lack score\.weight"):
        model_of(folder)


def test_a_limit_beyond_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"65 tokens, and .* reads at most 64"):
        model_of(save(tmp_path / "model"), max_length=65)


async def test_a_process_of_its_own_scores(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    pool = RewardPool(RewardSpec(kind="model", path=str(folder)), tmp_path / "log")
    try:
        result = await pool.score("3", None, {}, {"prompt": lambda: "1+2="})
        assert result.reward == pytest.approx(alone(folder, "1+2=3"), abs=1e-5)
        of_the_row = await pool.score("3", None, {"prompt": "1+2="})
        assert of_the_row.reward == pytest.approx(result.reward, abs=1e-5)
        assert await pool.score("3", None, {}) == ScoreResult(
            error="ValueError: the row has no column prompt"
        )
    finally:
        await pool.stop()
