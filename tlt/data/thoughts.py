"""Know a thought by its tags: what it says is no answer, and before its end there is none.

The prompt opens it, where the chat template does, or the answer itself.
"""

import re

# by what opens a thought, what ends it
TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
}
_OPENS, _ENDS = (re.compile("|".join(map(re.escape, tags))) for tags in (TAGS, TAGS.values()))


def opens_thought(prompt: str) -> bool:
    """Return True if a prompt ends with the tag that opens a thought."""
    return prompt.rstrip().endswith(tuple(TAGS))


def text_after_thoughts(answer: str, *, in_thought: bool) -> str | None:
    """Return what follows the last thought, or None if that doesn't end.

    `in_thought` says that the prompt opens one.
    """
    *thoughts, rest = _ENDS.split(answer)
    unfinished = (in_thought and not thoughts) or _OPENS.search(rest)
    return None if unfinished else rest


def tag_in(text: str) -> str | None:
    """Return a tag that a text has."""
    return next((tag for tag in (*TAGS, *TAGS.values()) if tag in text), None)
