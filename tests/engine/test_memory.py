"""An engine's memory is what it says, whatever comes."""

import subprocess
import sys
from pathlib import Path

from tests.engine.conftest import MakeEngine, save_model
from tests.engine.oracle import ask, finish

_FILL = """
import sys
from pathlib import Path
import torch
from tests.engine.oracle import ask, show
from tlt.engine.native import NativeEngine
from tlt.models.folder import load_decoder
from tlt.types import PolicyVersion

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

def fill(slots, context):
    engine = NativeEngine(
        load_decoder(Path(sys.argv[1])), show, slots, context, torch.device("cpu"),
        PolicyVersion(0), (1, 2),
    )
    engine.submit([ask(i, (3 + i, 4, 5), max_new_tokens=context) for i in range(slots)])
    while engine.running:
        engine.step()
    return engine

torch.set_num_threads(1)
small = fill(2, 64)  # what a first engine of any size costs
before = resident()
engine = fill(64, 1024)
print(engine.memory, resident() - before)
"""


def test_64_slots_of_1024_tokens_take_what_was_said(tmp_path: Path) -> None:
    folder = save_model(tmp_path, seed=1, max_position_embeddings=1024, num_hidden_layers=3)
    command = [sys.executable, "-c", _FILL, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    said, taken = map(int, done.stdout.split())
    # per token: keys and values of 3 layers, 2 heads, 16 wide; 2 states; token and log-prob
    tokens = 68 * 1024
    assert said >= tokens * (3 * 2 * 2 * 16 * 4 + 2 * 64 * 4 + 8 + 4)
    assert abs(taken - said) < 0.1 * said


def test_out_of_slots_means_waiting(make_engine: MakeEngine, folder: Path) -> None:
    engine = make_engine(folder, slots=2)
    engine.submit([ask(i, (i % 90, 5), max_new_tokens=3) for i in range(300)])
    done = finish(engine)
    assert len(done) == 300
    if engine.capabilities.token_identical:  # the others' slots are those of a shared server
        assert all(span.size <= 2 for c in done.values() for span in c.batches)
