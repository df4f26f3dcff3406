"""An engine allocates as much memory as it announces."""

import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import MakeEngine, save_model
from tests.engine.drafter_models import random_drafter
from tests.engine.reference import answers, finish, new_request, show
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Draft, Ngram
from tlt.engine.base import Sampling
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder

ARMS = (Draft(depth=4), Ngram(tokens=4))
_FILL = """
import sys
from pathlib import Path
import torch
from tests.engine.drafter_models import random_drafter
from tests.engine.reference import new_request, show
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.base.strategies import Draft, Ngram, Off
from tlt.base.id_types import DrafterVersion, PolicyVersion

ARMS = {"ngram": Ngram(tokens=8), "draft": Draft(depth=8)}

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

def fill(slots, context):
    engine = NativeEngine(
        load_decoder(Path(sys.argv[1])), show, slots, context, torch.device("cpu"),
        PolicyVersion(0), (1, 2, 3), arms, ngram_bytes=4 << 20,
    )
    if arms:
        engine.speculation.adopt_drafter(DrafterVersion(1), drafter)
    for arm in (Off(), *arms):
        # a prompt fills most of a slot in one pass
        length = context - 40
        prompts = [[(3 + i + j) % 97 for j in range(length)] for i in range(slots)]
        engine.submit([new_request(i, p, max_new_tokens=40) for i, p in enumerate(prompts)])
        engine.speculation.set_strategy(Off() if isinstance(arm, Draft) else arm)
        # a drafter computes missing entries, so the last tokens suffice to fill its cache
        for step in range(20):
            engine.step()
        engine.speculation.set_strategy(arm)
        while engine.running:
            engine.step()
    return engine

torch.set_num_threads(1)
drafter = random_drafter("eagle", 1)
arms = [ARMS[name] for name in sys.argv[2:]]
small = fill(2, 64)  # the first engine of a process costs extra
before = resident()
engine = fill(64, 1024)
print(engine.memory_bytes, resident() - before)
"""


@pytest.mark.parametrize("arms", [(), ("ngram", "draft")], ids=["plain", "speculative"])
def test_64_slots_of_1024_tokens_take_the_announced_bytes(
    tmp_path: Path, arms: Sequence[str]
) -> None:
    folder = save_model(tmp_path, seed=1, max_position_embeddings=2048, num_hidden_layers=3)
    command = [sys.executable, "-c", _FILL, str(folder), *arms]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    announced, taken = map(int, done.stdout.split())
    # per token: keys and values of 3 layers, 2 heads, 16 wide; 3 states; token and log-prob
    tokens = 68 * 1024
    assert announced >= tokens * (3 * 2 * 2 * 16 * 4 + 3 * 64 * 4 + 8 + 4)
    assert abs(taken - announced) < 0.1 * announced


def test_index_stays_within_its_budget(folder: Path) -> None:
    budget = 1 << 17
    engine = NativeEngine(
        load_decoder(folder),
        show,
        16,
        128,
        torch.device("cpu"),
        PolicyVersion(0),
        arms=ARMS,
        ngram_bytes=budget,
    )
    engine.speculation.set_strategy(Ngram(tokens=4))
    announced, held = engine.memory_bytes, list[int]()
    tracemalloc.start()
    for first in range(0, 80, 20):
        submitted = [new_request(i, (i // 2, 5), Sampling(), 100) for i in range(first, first + 20)]
        assert len(answers(engine, submitted)) == 20
        held.append(allocated_by_index())
    tracemalloc.stop()
    assert engine.memory_bytes == announced
    # an index of all answers would take twice as much
    assert 0.8 * budget < held[-1] <= max(held) < 1.1 * budget


def allocated_by_index() -> int:
    trace = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(True, "*/engine/ngram/*")]
    )
    return sum(statistic.size for statistic in trace.statistics("filename"))


def test_answers_are_those_of_before_after_memory_was_released(
    make_engine: MakeEngine, folder: Path
) -> None:
    engine = make_engine(folder, slots=2)
    requests = [new_request(i, (i, 5, 7, 5), Sampling(temperature=0.0), 20) for i in range(4)]
    engine.submit(requests[:2])
    engine.release_memory()  # changes nothing while requests run
    before = finish(engine)
    engine.release_memory()
    engine.release_memory()
    engine.swap_weights(PolicyVersion(2), load_decoder(folder).weights)
    again = answers(engine, requests)
    assert {id: again[id].tokens for id in before} == {id: c.tokens for id, c in before.items()}
    engine.release_memory()
    assert len(answers(engine, requests[2:])) == 2


def test_cancelled_requests_are_returned_before_memory_is_released(folder: Path) -> None:
    engine = NativeEngine(load_decoder(folder), show, 2, 64, torch.device("cpu"), PolicyVersion(0))
    engine.submit([new_request(i, (i, 5, 7)) for i in range(2)])
    engine.step()
    engine.cancel([0, 1])
    engine.release_memory()
    assert sorted(done.id for done in engine.step()) == [0, 1]
    engine.release_memory()
    assert len(answers(engine, [new_request(i, (i, 5, 7)) for i in range(2)])) == 2


def test_released_memory_is_that_of_slots_and_drafter(folder: Path) -> None:
    slots, context = 8, 128
    engine = NativeEngine(
        load_decoder(folder), show, slots, context, torch.device("cpu"), PolicyVersion(0),
        captured=(1, 2, 3), arms=ARMS,
    )  # fmt: skip
    engine.speculation.adopt_drafter(DrafterVersion(1), random_drafter("eagle", 1))
    engine.speculation.set_strategy(Draft(depth=4))
    requests = [new_request(i, (i, 5, 7), Sampling(), 30) for i in range(slots)]
    before = {id: done.tokens for id, done in answers(engine, requests).items()}
    text = [3, 1, 4, 1, 5]
    states = engine.compute_hidden_states(text, lambda: None).clone()
    held = engine.memory_bytes
    engine.release_memory()
    # keys and values of three layers, three states, and the drafter's cache, by position
    rows, positions, width = slots + 4, context + 4, 4
    expected = rows * positions * (3 * 2 * 2 * 16 + 3 * 64) * width
    freed = held - engine.memory_bytes
    assert expected < freed < 1.3 * expected
    torch.testing.assert_close(engine.compute_hidden_states(text, lambda: None), states)
    assert engine.memory_bytes == held
    engine.release_memory()
    assert {id: done.tokens for id, done in answers(engine, requests).items()} == before
    assert engine.memory_bytes == held


def test_requests_without_a_slot_wait(make_engine: MakeEngine, folder: Path) -> None:
    engine = make_engine(folder, slots=2)
    engine.submit([new_request(i, (i % 90, 5), max_new_tokens=3) for i in range(300)])
    done = finish(engine)
    assert len(done) == 300
    if engine.capabilities.token_identical:  # other engines share the slots of one server
        assert all(span.size <= 2 for c in done.values() for span in c.batches)
