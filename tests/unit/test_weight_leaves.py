"""Weights are laid out for other readers of safetensors, a leaf at a time."""

import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tlt.blobs.blob_digest import LEAF_BYTES, LEAVES_AHEAD, Leaf
from tlt.models.safetensors_io import write_weights
from tlt.models.weight_leaves import Cut, Layout


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


def test_shares_from_a_device_stay_until_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads write at most `LEAVES_AHEAD` runs late, however few leaves the file has."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    tensors = {str(n): torch.randn(64, 1365) for n in range(3 * LEAVES_AHEAD)}
    write_weights(tmp_path / "file", tensors)
    content = (tmp_path / "file").read_bytes()
    layout = Layout({name: (each.shape, each.dtype) for name, each in tensors.items()})
    parts = [
        (cut.part(cut.begin, cut.begin + (cut.end - cut.begin) // 2), tensors[cut.name])
        for cut in layout.cuts()
    ]
    pieces = [(cut, partial(_cut, cut, whole)) for cut, whole in parts]
    late = deque[Leaf]()
    for leaf in layout.share(pieces, torch.device("cuda"), header=True):
        late.append(leaf)
        if len(late) > LEAVES_AHEAD:
            _assert_intact(late.popleft(), content)
    for leaf in late:
        _assert_intact(leaf, content)


def _cut(cut: Cut, whole: torch.Tensor) -> torch.Tensor:
    return whole.view(-1)[cut.begin : cut.end]


def _assert_intact(leaf: Leaf, content: bytes) -> None:
    made = bytes(leaf.make())
    assert made == content[leaf.offset : leaf.offset + len(made)]


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
