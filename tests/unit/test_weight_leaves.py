"""Weights are laid out for other readers of safetensors, a leaf at a time."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tlt.blobs.blob_digest import LEAF_BYTES, LEAVES_AHEAD
from tlt.models.safetensors_io import write_weights
from tlt.models.weight_leaves import Layout


def test_tensors_of_several_formats_are_read_as_they_were(tmp_path: Path) -> None:
    tensors = {
        "number": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "none": torch.empty(0, 4),
        "turned": torch.randn(4, 6).t(),
        "wide": torch.randn(7, dtype=torch.float64),
        "large": torch.randn(5, LEAF_BYTES // 4),
        "view": torch.arange(40.0)[3:20:2],
    }
    write_weights(tmp_path / "file", tensors)
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_missing_pieces_are_noticed() -> None:
    layout = Layout({"weight": ((4, 4), torch.float32)})
    with pytest.raises(ValueError, match="shorter"):
        list(layout.leaves([]))


_PEAK = """
import sys
from pathlib import Path
import torch
from tlt.blobs.blob_digest import LEAF_BYTES
from tlt.blobs.blob_files import Blobs
from tlt.models.weight_leaves import Layout, pieces_of

def figure(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

torch.set_num_threads(1)
blobs = Blobs(Path(sys.argv[1]), Path(sys.argv[1]) / "none")
blobs.put(b"first", commit=False)
weights = {str(n): torch.ones(LEAF_BYTES) for n in range(20)}
layout = Layout({name: (weight.shape, torch.bfloat16) for name, weight in weights.items()})
Path("/proc/self/clear_refs").write_text("5")
before = figure("VmRSS")
blobs.put_leaves(layout.leaves(pieces_of(layout, weights.__getitem__)), commit=False)
print((figure("VmHWM") - before) / LEAF_BYTES)
"""


def test_publishing_takes_a_leaf_of_memory_for_each_thread(tmp_path: Path) -> None:
    """Beside the file in shared memory; threads themselves take a little."""
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < LEAVES_AHEAD / 2 + 2
