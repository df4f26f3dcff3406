"""The n-gram index agrees with a full search and stays within its budget."""

import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from tlt.engine.ngram import NgramIndex, group_token_index
from tlt.engine.ngram.group_token_index import CONTEXTS, LONGEST

PLENTY = 1 << 30
PROMPT = [7, 8, 9]
TOKENS = st.lists(st.integers(0, 2), max_size=12)


class Oracle:
    """Search all answers of a group, whose tokens are kept in the order of arrival."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)
        self.written: list[list[int]] = []
        self.positions: list[tuple[int, int]] = []
        self.write(self.begin([]), prompt)

    def begin(self, prompt: Sequence[int] | None = None) -> int:
        prompt = self.prompt if prompt is None else list(prompt)
        self.written.append(([-1] * LONGEST + prompt)[-LONGEST:])
        return len(self.written) - 1

    def write(self, answer: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.positions.append((answer, len(self.written[answer])))
            self.written[answer].append(token)

    def propose(self, answer: int, count: int) -> list[int]:
        for length in CONTEXTS:
            context = self.written[answer][-length:]
            found = [
                self.written[other][position : position + count]
                for other, position in reversed(self.positions)
                if self.written[other][position - length : position] == context
            ][:8]
            if found:
                return majority(found)
        return []


def majority(candidates: list[list[int]]) -> list[int]:
    candidates = [candidate for candidate in candidates if candidate]
    if not candidates:
        return []
    ((first, _),) = Counter(candidate[0] for candidate in candidates).most_common(1)
    return [first, *majority([candidate[1:] for candidate in candidates if candidate[0] == first])]


@given(
    st.lists(st.tuples(st.sampled_from(["extend", "end", "add"]), st.integers(0, 3), TOKENS)),
    st.integers(1, 9),
)
def test_proposals_equal_those_of_a_full_search(
    events: list[tuple[str, int, list[int]]], count: int
) -> None:
    index, oracle = NgramIndex(PLENTY), Oracle(PROMPT)
    answers: dict[int, int] = {}
    # without the limit, other contexts in a bucket cannot end the search early
    with patch.object(group_token_index, "MAX_CHAIN_LINKS", 10**9):
        for event, row, tokens in events:
            if event == "add":
                index.add("group", PROMPT, tokens)
                oracle.write(oracle.begin(), tokens)
            elif event == "end" and row in answers:
                index.end(row)
                del answers[row]
            else:
                if row not in answers:
                    index.begin(row, PROMPT, "group")
                    answers[row] = oracle.begin()
                index.extend(row, tokens)
                oracle.write(answers[row], tokens)
            for running, answer in answers.items():
                assert index.propose(running, count) == oracle.propose(answer, count)


def test_proposals_in_long_histories_equal_those_of_a_full_search() -> None:
    dice = random.Random(0)
    index, oracle = NgramIndex(PLENTY), Oracle(PROMPT)
    rows = [oracle.begin() for _ in range(5)]
    for row in rows:
        index.begin(row, PROMPT, "group")
    with patch.object(group_token_index, "MAX_CHAIN_LINKS", 10**9):
        for _ in range(400):
            row = dice.choice(rows)
            tokens = dice.choices(range(6), k=dice.randrange(8))
            index.extend(row, tokens)
            oracle.write(row, tokens)
            assert index.propose(row, 6) == oracle.propose(row, 6)


@given(st.lists(st.lists(st.integers(0, 2), max_size=60), max_size=4), st.integers(1, 7))
def test_finds_streamed_tokens_like_whole_answers(answers: list[list[int]], size: int) -> None:
    whole, pieces = NgramIndex(PLENTY), NgramIndex(PLENTY)
    for row, answer in enumerate(answers):
        whole.add("group", PROMPT, answer)
        pieces.begin(row, PROMPT, "group")
        for start in range(0, len(answer), size):
            pieces.extend(row, answer[start : start + size])
        pieces.end(row)
    assert whole.bytes == pieces.bytes
    for index in (whole, pieces):
        index.begin(99, PROMPT, "group")
    for token in [0, 1, 2, 2, 1, 0, 0, 1, 2]:
        whole.extend(99, [token])
        pieces.extend(99, [token])
        assert whole.propose(99, 5) == pieces.propose(99, 5)


def test_proposes_from_running_and_finished_siblings() -> None:
    index = NgramIndex(PLENTY)
    index.begin(0, PROMPT, "group")
    index.begin(1, PROMPT, "group")
    assert index.propose(1, 4) == []
    index.extend(0, [10, 11, 12])
    assert index.propose(1, 4) == [10, 11, 12]
    index.extend(0, [13, 14])
    index.end(0)
    assert index.propose(1, 4) == [10, 11, 12, 13]


def test_proposes_from_answers_of_other_workers_and_earlier_steps() -> None:
    index = NgramIndex(PLENTY)
    index.add("group", PROMPT, [10, 11, 12, 13])
    index.begin(0, PROMPT, "group")
    index.extend(0, [10, 11])
    assert index.propose(0, 1) == [12]
    assert index.propose(0, 9) == [12, 13]


def test_proposes_from_the_prompt() -> None:
    index = NgramIndex(PLENTY)
    index.begin(0, [1, 2, 3, 4, 5, 6], "group")
    index.extend(0, [2, 3])
    assert index.propose(0, 3) == [4, 5, 6]


def test_does_not_propose_from_other_groups() -> None:
    index = NgramIndex(PLENTY)
    index.add("other", PROMPT, [10, 11, 12, 13])
    index.begin(0, PROMPT, "group")
    assert index.propose(0, 4) == []


def test_proposes_the_most_frequent_then_the_newest_continuation() -> None:
    index = NgramIndex(PLENTY)
    index.begin(0, PROMPT, "group")
    for answer in ([10, 20], [10, 20], [10, 30, 40], [10, 30, 50]):
        index.add("group", PROMPT, answer)
    assert index.propose(0, 3) == [10, 30, 50]
    index.add("group", PROMPT, [10, 20, 60])
    assert index.propose(0, 3) == [10, 20, 60]


def test_reused_row_forgets_its_previous_answer() -> None:
    index = NgramIndex(PLENTY)
    index.begin(0, PROMPT, "group")
    index.extend(0, [1, 2, 3, 1, 2])
    index.end(0)
    index.begin(0, [4, 5], "other")
    assert index.propose(0, 3) == []
    index.extend(0, [1, 2])
    assert index.propose(0, 3) == []
    index.end(0)
    index.begin(0, PROMPT, "group")
    assert index.propose(0, 3) == [1, 2, 3]


def test_rows_of_a_dropped_group_continue_without_proposals() -> None:
    index = NgramIndex(1)
    index.begin(0, PROMPT, "group")
    assert index.bytes == 0
    index.extend(0, [1, 2, 3, 1, 2])
    assert index.propose(0, 3) == []
    index.begin(1, PROMPT, "group")
    index.extend(1, [5, 6, 5, 6])
    index.extend(0, [5, 6])
    assert index.propose(0, 3) == index.propose(1, 3) == []
    index.end(0)
    assert index.bytes == 0


def test_drops_the_least_recently_written_group_first() -> None:
    one = NgramIndex(PLENTY)
    one.add("only", PROMPT, range(500))
    index = NgramIndex(2 * one.bytes + 4000)
    index.add("first", PROMPT, range(500))
    index.add("second", PROMPT, range(500))
    index.add("first", PROMPT, [1])
    index.add("third", PROMPT, range(500))
    proposed = {}
    for row, group in enumerate(["first", "third", "second"]):
        index.begin(row, PROMPT, group)
        proposed[group] = index.propose(row, 2)
    assert proposed["third"] == [0, 1]
    assert proposed["first"] != []
    assert proposed["second"] == []


def test_drops_the_oldest_answers_of_the_last_group_but_keeps_running_rows() -> None:
    index = NgramIndex(40_000)
    index.begin(0, PROMPT, "group")
    for answer in range(40):
        index.add("group", PROMPT, [1000 * answer + position for position in range(100)])
        assert index.bytes <= 40_000
    index.extend(0, [1, 2, 3, 1, 2])
    assert index.propose(0, 2) == [3, 1]
    index.begin(1, [4], "group")
    index.extend(1, [0, 1])
    assert index.propose(1, 2) == []
    index.extend(1, [39_004, 39_005])
    assert index.propose(1, 2) == [39_006, 39_007]


def test_keeps_nothing_with_a_tiny_budget() -> None:
    index = NgramIndex(0)
    index.add("group", PROMPT, [1, 2, 3])
    index.begin(0, PROMPT, "group")
    index.extend(0, [1, 2])
    assert index.propose(0, 2) == []
    assert index.bytes == 0
    index.end(0)


def test_rows_alone_stay_within_the_budget() -> None:
    index = NgramIndex(60_000)
    for row in range(8):
        index.begin(row, PROMPT, row % 3)
    for position in range(2000):
        for row in range(8):
            index.extend(row, [position, row])
        assert index.bytes <= 60_000
    index.propose(7, 3)


def traced(budget: int, groups: int, answers: int, length: int) -> tuple[int, int]:
    """Return the bytes that tracemalloc and the index count after adding the answers."""
    dice = random.Random(0)
    texts = [[dice.choices(range(50_000), k=length)] * groups for _ in range(answers)]
    index = NgramIndex(budget)
    tracemalloc.start()
    try:
        for to_all in texts:
            for group, text in enumerate(to_all):
                index.add(group, text[:20], text)
        return tracemalloc.get_traced_memory()[0], index.bytes
    finally:
        tracemalloc.stop()


def test_counted_bytes_equal_allocated_bytes() -> None:
    for groups, answers, length in ((1, 4, 5000), (1, 100, 40), (200, 1, 30), (10, 10, 300)):
        allocated, counted = traced(PLENTY, groups, answers, length)
        assert 0.85 * allocated < counted < 1.15 * allocated, (groups, answers, length)


def test_the_budget_bounds_what_is_allocated() -> None:
    for groups, answers, length in ((1, 40, 1000), (40, 8, 100)):
        allocated, counted = traced(250_000, groups, answers, length)
        assert counted <= 250_000
        assert allocated < 1.2 * 250_000, (groups, answers, length)
