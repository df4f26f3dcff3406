"""Fixtures of ranks that train the drafter."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.members import member_of, member_ranks
from tlt.ranks.drafter.member import DrafterMember
from tlt.ranks.main import Rank


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[tuple[Rank, Rank]]:
    with member_ranks(tmp_path) as found:
        yield found


@pytest.fixture
def member(two_ranks: tuple[Rank, Rank]) -> DrafterMember:
    return member_of(two_ranks[0])


@pytest.fixture
def peer(two_ranks: tuple[Rank, Rank]) -> DrafterMember:
    """Return another member."""
    return member_of(two_ranks[1])
