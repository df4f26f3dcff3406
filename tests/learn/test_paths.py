"""Which attention is taken: measured once, forced by the spec, refused where it would be wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tests.learn.models import CPU, PATHS, needs_compiler, save_mistral, spec
from tlt.errors import ConfigError
from tlt.learn import paths
from tlt.learn.attention import NATIVE, PACKED
from tlt.learn.kernels import Kernels, kernels
from tlt.learn.loading import load_model

NAMES = {"padded": "sdpa", "packed": PACKED, "native": NATIVE}
_build: Callable[[], Kernels | None] = kernels.__wrapped__


def attention_of(folder: str, **changes: Any) -> tuple[str, bool]:
    model = load_model(folder, CPU)
    packed = paths.set_attention(model, spec(**changes), 64)
    return str(model.config._attn_implementation), packed


@pytest.mark.parametrize("wanted", PATHS)
def test_the_spec_decides(model_dir: str, wanted: str):
    with capture_logs() as logs:
        assert attention_of(model_dir, attention=wanted) == (NAMES[wanted], wanted != "padded")
    assert logs == []


def test_left_to_itself_it_measures_once(model_dir: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paths, "_chosen", {})
    with capture_logs() as logs:
        first, second = attention_of(model_dir), attention_of(model_dir)
    assert first == second
    (entry,) = logs
    assert NAMES[entry["attention"]] == first[0]
    kinds = {"padded", "packed"} | ({"native"} if kernels() else set())
    assert entry["measured"].keys() == kinds
    assert all(seconds > 0 for seconds in entry["measured"].values())


def test_the_fastest_is_taken_and_a_draw_stays_as_it_was(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
):
    seconds = {"padded": 1.0, "packed": 0.99, "native": 0.98}
    monkeypatch.setattr(paths, "_seconds", lambda *arguments: seconds[arguments[-1]])
    monkeypatch.setattr(paths, "_chosen", {})
    assert attention_of(model_dir) == ("sdpa", False)
    seconds["packed"] = 0.5
    monkeypatch.setattr(paths, "_chosen", {})
    assert attention_of(model_dir) == (PACKED, True)


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false", "cc -Dlogf=expf"])
def test_without_a_sound_compiler_the_rest_goes_on(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, compiler: str
):
    monkeypatch.setenv("CC", compiler)
    with capture_logs() as logs:
        assert _build() is None
    assert len(logs) == 1
    monkeypatch.setattr(paths, "kernels", lambda: None)
    monkeypatch.setattr(paths, "_chosen", {})
    assert attention_of(model_dir)[0] in ("sdpa", PACKED)
    with pytest.raises(ConfigError, match="C compiler"):
        attention_of(model_dir, attention="native")


@needs_compiler
def test_a_built_kernel_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert _build() is not None
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_a_window_stays_padded(tmp_path: Path):
    folder = save_mistral(tmp_path)
    assert attention_of(folder) == ("sdpa", False)
    with pytest.raises(ConfigError, match="does not fit mistral"):
        attention_of(folder, attention="packed")


def test_bfloat16_needs_matrix_units_or_a_word(monkeypatch: pytest.MonkeyPatch):
    assert paths.takes_bfloat16(spec(precision="bfloat16"), CPU)
    assert not paths.takes_bfloat16(spec(precision="float32"), torch.device("cuda"))
    for units in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda units=units: units)
        assert paths.takes_bfloat16(spec(precision="auto"), CPU) is units
