"""A prompt goes through the chat template with the spec's variables and the row's tools."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tlt.errors import DataError
from tlt.models.tokenizer import Tokenizer
from tlt.spec.config import DataSpec

REASONER = Path(__file__).resolve().parents[2] / "examples" / "tiny_reasoner" / "model"
# digits, + and = are in the reasoner's vocabulary
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}={% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}00{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("chat")
    for file in REASONER.glob("*.json"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(str(folder))


def text(tokenizer: Tokenizer, prompt: Any, tools: Any = None, **changes: Any) -> str:
    spec = DataSpec(train="", chat_template=True, **changes)
    return tokenizer.decode(tokenizer.prompt_tokens(prompt, spec, "row 1", tools))


def test_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    assert text(tokenizer, "1+2") == "1+2="
    assert text(tokenizer, "1+2", chat_template_kwargs={"enable_thinking": False}) == "1+2=00"


def test_messages_and_tools_reach_the_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "1+"}, {"role": "user", "content": "2"}]
    assert text(tokenizer, messages) == "1+2="
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    assert text(tokenizer, messages, tools, tools_key="tools", system_prompt="9") == "91+22="


def test_what_the_template_refuses_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="row 1: the chat template refuses it"):
        text(tokenizer, "1", chat_template_kwargs={"messages": 1})


def test_variables_need_the_template() -> None:
    with pytest.raises(ValueError, match="need chat_template: true"):
        DataSpec(train="", chat_template_kwargs={"enable_thinking": False})


def test_decoding_keeps_the_tags_of_a_thought(tmp_path: Path) -> None:
    """Some tokenizers have them as special tokens, which are left out otherwise."""
    folder = shutil.copytree(REASONER, tmp_path / "model")
    plain = AutoTokenizer.from_pretrained(folder)
    plain.add_tokens(["[THINK]", "[/THINK]", "<pad2>"], special_tokens=True)
    plain.save_pretrained(folder)
    tokenizer = Tokenizer(str(folder))
    tokens = tokenizer.prompt_tokens("[THINK]1+2<pad2>[/THINK]=3", DataSpec(train=""), "row 1")
    assert tokenizer.decode(tokens) == "[THINK]1+2[/THINK]=3"
    assert tokenizer.decode(tokens[-2:]) == "=3"
