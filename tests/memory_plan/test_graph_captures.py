"""The graphs that SGLang captures are counted before, and bounded."""

from itertools import pairwise

import msgspec
import pytest

from tests.memory_plan.test_plans import MEDIUM, usual_job
from tlt.engine.sglang.client import sglang_launcher
from tlt.memory_plan import Spread
from tlt.memory_plan.engine_memory import engine_items
from tlt.memory_plan.graph_captures import MOST_CAPTURES, graph_bytes, plan_captures

# those of the default arms
LENGTHS = (0, 2, 4, 6, 8, 12)
# SGLang's own sizes up to 64 for a server that speculates
UPSTREAM = 8 + 12 + 7


@pytest.mark.parametrize(
    ("slots", "sizes", "count"),
    [
        (8, (1, 2, 3, 4, 6, 8), 102),
        (32, (1, 2, 3, 6, 10, 18, 32), 119),
        (64, (1, 2, 4, 8, 16, 32, 64), 119),
    ],
)
def test_sizes_and_graphs_by_slots(slots: int, sizes: tuple[int, ...], count: int) -> None:
    captures = plan_captures(slots, LENGTHS)
    assert captures.sizes == sizes
    assert captures.total == count <= MOST_CAPTURES
    # a batch is padded to less than twice its rows
    assert all(after < 2 * before + 1 for before, after in pairwise(sizes))


def test_all_of_upstreams_sizes_would_be_four_times_as_many() -> None:
    captures = plan_captures(64, LENGTHS)
    each = captures.passes + captures.proposals + captures.extensions
    assert UPSTREAM * each == 459 > 3.8 * captures.total


@pytest.mark.parametrize("lengths", [(0,), (0, 1), (0, 4), LENGTHS, tuple(range(40)), range(200)])
@pytest.mark.parametrize("slots", [1, 2, 7, 64, 256, 1024])
def test_there_are_never_more_graphs_than_the_bound(slots: int, lengths: tuple[int, ...]) -> None:
    captures = plan_captures(slots, tuple(lengths))
    assert captures.total <= MOST_CAPTURES
    assert captures.sizes == tuple(sorted(set(captures.sizes)))
    assert not captures.sizes or captures.sizes[-1] == slots


def test_a_server_that_cannot_speculate_captures_passes_alone() -> None:
    captures = plan_captures(64, (0,))
    assert (captures.passes, captures.proposals, captures.extensions) == (1, 0, 0)
    assert len(captures.sizes) == captures.total == 14


def test_memory_grows_with_what_is_captured() -> None:
    plain = usual_job(MEDIUM, engine="sglang", slots=64, max_context=4096)
    speculating = msgspec.structs.replace(plain, drafts=12, lengths=LENGTHS)
    without, many = (graph_bytes(job, Spread()) for job in (plain, speculating))
    assert without < many
    # mostly a workspace for each draft length
    assert 3 << 30 < many < 5 << 30
    items = {item.name: item for item in engine_items(speculating, Spread())}
    assert items["engine: CUDA graphs"].bytes == many
    assert "119 graphs" in items["engine: CUDA graphs"].note


def test_sglang_is_told_which_sizes_to_capture() -> None:
    graphs = sglang_launcher.graph_arguments(64, LENGTHS)
    assert graphs == {
        "disable_prefill_cuda_graph": True,
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
    }
    many = sglang_launcher.graph_arguments(64, range(200))
    assert many == {"disable_prefill_cuda_graph": True, "disable_decode_cuda_graph": True}
