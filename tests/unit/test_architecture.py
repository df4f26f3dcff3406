"""ARCHITECTURE.md describes the code as it is.

A numbered entry is `path:function`. It ends with `→ Message` if it reaches the next entry by a
struct of tlt/protocol instead of a call; the next entry handles or carries that struct. The items
under an entry are functions that it calls, or that call each other.
"""

import re
from pathlib import Path

import pytest

from tests.call_paths import PAGE, ROOT, Code

MARKDOWN = sorted(path for pattern in ("*.md", "docs/**/*.md") for path in ROOT.glob(pattern))
TO_WEIGHTS = "From a prompt to new weights"
TO_DRAFTER = "From an idle worker to an adopted drafter"
# Largest number of files in a path. The second one doesn't count the transport between worker and
# decider again (event_outbox.py to redis_effects.py), which it shares with the first.
PATHS = {TO_WEIGHTS: 34, TO_DRAFTER: 22}
# The decider, the worker's actor, the rank's loop, and the channel between them. Drafter training
# is the half of that loop that learns, and later merges, so it is entered twice, too.
ENTERED_AGAIN = {
    "tlt/policies/run/coordinator.py",
    "tlt/actors/worker/message_router.py",
    "tlt/ranks/main.py",
    "tlt/ranks/drafter/member.py",
    "tlt/ranks/worker_channel.py",
}
_ROUTER = "tlt/actors/worker/message_router.py"
_ROUTER_UPDATE = f"`{_ROUTER}:MessageRouter.tasks` follows commands. → `UpdatePolicy`"
# by what is gone: the path that breaks, and the edit
BREAKING_EDITS = {
    "merge command": (TO_DRAFTER, _ROUTER, "case MergeDrafter():", "case StartRollout():"),
    "adopt command": (TO_DRAFTER, _ROUTER, "case AdoptDrafter():", "case StartRollout():"),
    "update command": (TO_WEIGHTS, _ROUTER, "case UpdatePolicy():", "case StartRollout():"),
    "answer": (TO_WEIGHTS, _ROUTER, "case RolloutFinished():", "case DrafterTrainingStopped():"),
    "router": (
        TO_WEIGHTS,
        PAGE,
        _ROUTER_UPDATE,
        "`tlt/kernels/c_build.py:build_kernels` → `UpdatePolicy`",
    ),
    "end of a merge": (
        TO_DRAFTER,
        "tlt/policies/run/drafter_outcomes.py",
        "adopt_reject_revert.adopt_or_reject(turn, event)",
        "pass",
    ),
    "start of a session": (
        TO_DRAFTER,
        "tlt/policies/run/drafter_training_scheduler.py",
        "\n    start(turn, worker)\n",
        "\n    pass\n",
    ),
    "member's step": (
        TO_DRAFTER,
        "tlt/ranks/main.py",
        "self._send(*decoding.member.step(self._check_interrupt))",
        "pass",
    ),
}


@pytest.mark.parametrize("heading", PATHS)
def test_entries_exist_and_are_numbered(heading: str) -> None:
    code = Code()
    listed = code.entries(heading)
    assert [entry.number for entry in listed] == list(range(1, len(listed) + 1))
    for entry in listed:
        for call in entry.calls:
            assert call.function in code.functions(call.path), call
        assert entry.message is None or entry.message in code.messages(), entry


@pytest.mark.parametrize("heading", PATHS)
def test_a_path_enters_few_files_and_none_twice(heading: str) -> None:
    listed = Code().entries(heading)
    assert listed
    visits = [[call.path for call in entry.calls] for entry in listed]
    entered = [path for visit in visits for path in dict.fromkeys(visit)]
    again = {path for path in entered if entered.count(path) > 1}
    assert again <= ENTERED_AGAIN
    assert len(set(entered)) <= PATHS[heading]


@pytest.mark.parametrize("heading", PATHS)
def test_each_entry_calls_what_stands_under_it_and_reaches_the_next(heading: str) -> None:
    assert list(Code().faults(heading)) == []


@pytest.mark.parametrize("gone", BREAKING_EDITS)
def test_a_path_breaks_without_one_of_its_steps(gone: str) -> None:
    heading, path, old, new = BREAKING_EDITS[gone]
    text = Code().text(path)
    assert old in text
    assert list(Code({path: text.replace(old, new)}).faults(heading)) != []


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:tlt|cli|benchmarks|docs|examples|tests|configs)/[\w./*-]+)[:`]", text)
    linked = re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", text)
    missing = [path for path in named if not any(ROOT.glob(path.rstrip("/")))]
    missing += [link for link in linked if not (page.parent / link).exists()]
    assert not missing
