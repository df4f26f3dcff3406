"""Partial answers never go beyond the end of their request."""

from pathlib import Path

import pytest
import torch

from tests.engine.reference import GREEDY, new_request
from tlt.engine.sglang.client.tap_reader import TapReader
from tlt.engine.sglang.shared.shared_hidden_state_buffer import RequestName, Tap, TapShape


@pytest.mark.parametrize(
    ("filled", "most", "expected"),
    [
        (2, 9, None),
        (3, 9, [13]),
        (6, 9, [13, 14, 15, 16]),
        # drafts were accepted beyond the most tokens, and beyond a stop token
        (9, 4, [13, 14, 15, 16]),
        (9, 9, [13, 14, 15, 16, 17]),
    ],
)
def test_partial_answers_end_where_the_answer_does(
    tmp_path: Path, filled: int, most: int, expected: list[int] | None
) -> None:
    shape = TapShape(slots=2, positions=16, layers=0, hidden=1, dtype="float32")
    tap = Tap.create(tmp_path / "tap", shape)
    name = RequestName(slot=1, serial=7, salt="")
    tap.holders[1], tap.filled[1] = 7, filled
    # at each position the token that was drawn there: the answer's first is the last prompt token's
    tap.tokens[1] = torch.arange(11, 27)
    request = new_request(0, (1, 2, 3), GREEDY, most, stop_tokens=[17])
    assert TapReader(tap).partial_answer(request, name) == expected
