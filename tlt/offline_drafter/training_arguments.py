"""The arguments of a training: the same plan continues it, another plan is refused."""

from typing import Literal

import msgspec


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    file: str
    # True if the file has answers; otherwise the policy generates them
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
