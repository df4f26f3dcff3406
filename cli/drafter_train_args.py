"""What a training was asked to do: the same plan goes on, another one begins anew."""

from typing import Literal

import msgspec


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    file: str
    # whether the file has answers, or the policy writes them
    answers_given: bool
    layout: Literal["eagle", "eagle3"]
    start: str | None
    tokens: int
    samples: int
    held_out: int
    max_context: int
    slots: int
    prompt_key: str
    answer_key: str
    chat_template: bool
    system_prompt: str | None
    seed: int
