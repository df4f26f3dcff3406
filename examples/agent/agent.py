"""Add a long sum in parts: an agent that knows the `openai` package and nothing of TLT."""

import re
from typing import Any

from openai import OpenAI

_PART = 6


def solve(row: dict[str, Any], seed: int) -> float:
    client = OpenAI()
    terms = row["prompt"].rstrip("=").split("+")
    # a part each, then the sum of the parts
    while len(terms) > 1:
        parts = [terms[i : i + _PART] for i in range(0, len(terms), _PART)]
        terms = [ask(client, part) for part in parts]
    return float(terms[0] == row["answer"])


def ask(client: OpenAI, terms: list[str]) -> str:
    """Return the sum of two-digit numbers, modulo 100, as the policy says it."""
    if len(terms) == 1:
        return terms[0]
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "+".join(terms) + "="}]
    )
    found = re.search(r"#(\d\d)$", answer.choices[0].message.content or "")
    return found[1] if found else "00"
