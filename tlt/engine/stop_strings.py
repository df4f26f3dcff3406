"""Detect stop strings at a cost per token that doesn't grow with the answer."""

from collections.abc import Callable, Sequence


def completes_stop_string(
    tokens: Sequence[int], stops: Sequence[str], decode_text: Callable[[Sequence[int]], str]
) -> bool:
    """Return True if the last token completed a stop string; only the text's tail is searched."""
    longest = max(map(len, stops))
    window = longest + 1
    while window < len(tokens) and len(_whole(decode_text(tokens[-window:-1]))) <= longest:
        # some tokens are no text, or parts of one character
        window *= 2
    tail = decode_text(tokens[-window:])
    return any(stop in tail for stop in stops)


def _whole(text: str) -> str:
    """Remove what is left of a character that the window cut."""
    return text.lstrip("\ufffd")
