"""A conversation grows by what the template writes behind exactly the tokens before."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Tokens
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tlt.errors import DataError
from tlt.models.chat_turns import TurnRenderer
from tlt.models.tokenizer import Tokenizer
from tlt.spec.config import DataSpec

# ChatML as Qwen has it: tools in the system message, what tools say in one of the user
CHATML = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}
{%- if m.role == "tool" %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content.split("</think>")[-1] }}<|im_end|>
{% endif %}{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{{ "<|begin|>" }}{%- for m in messages %}<|head|>{{ m.role }}<|/head|>

{{ m.content | trim }}<|im_end|>{%- endfor %}
{%- if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}"""
FORGETS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
END = "<|im_end|>"
SPECIAL = ["<|begin|>", "<|im_start|>", END, "<|head|>", "<|/head|>", "<|python_tag|>"]
SAID = [{"role": "tool", "content": "3"}, {"role": "user", "content": "And 4?"}]


def renderer(folder: Path, template: str, chat: bool = True) -> tuple[TurnRenderer, Tokenizer]:
    """Return a renderer with a tokenizer of bytes."""
    alphabet = sorted(ByteLevel.alphabet())
    tokens = Tokens(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokens.decoder = ByteLevelDecoder()  # pyright: ignore
    tokens.add_special_tokens(SPECIAL)
    tokens.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(str(folder))
    return TurnRenderer(tokenizer, DataSpec(train="", chat_template=chat)), tokenizer


@pytest.mark.parametrize("template", [CHATML, LLAMA])
@pytest.mark.parametrize("turn", ["The sum is ", "<think>1+2</think>3", "é"])
def test_a_conversation_grows_as_the_template_renders_it(
    tmp_path: Path, template: str, turn: str
) -> None:
    made, tokenizer = renderer(tmp_path, template)
    question: list[Any] = [{"role": "user", "content": "1+2?"}]
    before = made.prompt(question, [], "row 1")
    drawn = tokenizer.tokens_within(turn + END)
    assert made.text(drawn) == turn
    after = made.following(SAID, drawn)
    grown = tokenizer.decode_all((*before, *drawn, *after))
    # a thought stays, which the template would leave out; a trimmed text would be another one
    spoken = [*question, {"role": "assistant", "content": "TURN"}, *SAID]
    rendered = tokenizer.prompt_text(spoken, DataSpec(train="", chat_template=True), "row 1")
    assert grown == rendered.replace("TURN", turn)


def test_a_turn_that_a_stop_string_ended_gets_its_end(tmp_path: Path) -> None:
    made, tokenizer = renderer(tmp_path, CHATML)
    ended = made.following(SAID, tokenizer.tokens_within("x" + END))
    cut = made.following(SAID, tokenizer.tokens_within("x"))
    assert tokenizer.decode_all(cut) == END + tokenizer.decode_all(ended)


def test_tools_are_in_the_prompt_alone(tmp_path: Path) -> None:
    made, tokenizer = renderer(tmp_path, CHATML)
    tools = [{"type": "function", "function": {"name": "add"}}]
    prompt = made.prompt([{"role": "user", "content": "1+2?"}], tools, "row 1")
    assert '"name": "add"' in tokenizer.decode_all(prompt)
    following = made.following(SAID, tokenizer.tokens_within("x" + END))
    assert "add" not in tokenizer.decode_all(following)


def test_special_tokens_of_a_call_stay(tmp_path: Path) -> None:
    made, tokenizer = renderer(tmp_path, LLAMA)
    turn = tokenizer.tokens_within('<|python_tag|>{"name": "add"}' + END)
    assert made.text(turn) == '<|python_tag|>{"name": "add"}'


def test_a_plain_text_goes_on_as_it_is(tmp_path: Path) -> None:
    made, tokenizer = renderer(tmp_path, CHATML, chat=False)
    assert tokenizer.decode_all(made.following(SAID, [5])) == "3And 4?"
    assert tokenizer.decode_all(made.prompt([SAID[1]], [], "row 1")) == "And 4?"


def test_a_template_without_the_policy_s_turns_is_refused(tmp_path: Path) -> None:
    made, _ = renderer(tmp_path, FORGETS)
    with pytest.raises(DataError, match="leaves out what the policy said"):
        made.following(SAID, [5])
