"""A scheduler in which a hook of ours is not in force ends by name, or answers so."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engine.conftest import save_model
from tests.sglang.speculating import start_engine
from tlt.engine.sglang.client import sglang_launcher
from tlt.engine.sglang.scheduler import scheduler_hooks
from tlt.engine.sglang.shared.scheduler_options import (
    HooksInForce,
    SchedulerOptions,
    complain_of_hooks,
)
from tlt.errors import ConfigError, RankError

pytestmark = pytest.mark.sglang

# SGLang as it would be without one of the functions that we hook
INSTALL = """
import sys
from pathlib import Path
from tlt.engine.sglang.cpu import cpu_mode

cpu_mode.enter()
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry
from tlt.engine.sglang.scheduler import scheduler_hooks
from tlt.engine.sglang.shared.scheduler_options import SchedulerOptions
from tlt.engine.sglang.shared.shared_hidden_state_buffer import Tap, TapShape

{change}
shape = TapShape(slots=1, positions=4, layers=0, hidden=1, dtype="float32")
Tap.create(Path({tap!r}), shape)
options = SchedulerOptions(tap={tap!r}, shape=shape, device="cpu")
scheduler_hooks.install(options, lambda: None)
print("installed")
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", "installed"),
        ("del Scheduler.on_idle", "SGLang has no managers.scheduler.Scheduler.on_idle"),
        (
            "HookRegistry.apply_hooks = classmethod(lambda cls: None)",
            "SGLang did not apply TLT's hook to managers.scheduler",
        ),
    ],
    ids=["as it is", "without a function", "without its hooks"],
)
def test_a_hook_that_does_not_apply_ends_the_scheduler(
    tmp_path: Path, change: str, said: str
) -> None:
    script = INSTALL.format(change=change, tap=str(tmp_path / "tap"))
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert said in done.stdout + done.stderr
    assert (done.returncode == 0) == (not change)


def test_an_engine_whose_scheduler_has_no_hooks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would drop the model's stop tokens or fill the tap; speculation is off here."""
    monkeypatch.setattr(SchedulerOptions, "environment", lambda _: {})
    model = save_model(tmp_path / "policy", seed=1)
    with pytest.raises(RankError, match="scheduler 0 of 1: TLT's hooks are not in place"):
        start_engine(model, tmp_path, slots=2)


def test_stop_tokens_that_the_model_kept_are_named() -> None:
    worker = SimpleNamespace(candidate_steps=(0, 4))
    config = SimpleNamespace(hf_eos_token_id={7, 2})
    hooks = object.__new__(scheduler_hooks._Hooks)  # pyright: ignore[reportPrivateUsage]
    scheduler = SimpleNamespace(model_worker=worker, model_config=config)
    said = hooks.answer({"status": "ready"}, scheduler)
    assert said["status"] == "ready"
    assert "stop tokens [2, 7] would end answers" in (complain_of_hooks(said, (0, 4)) or "")
    assert "instead of [0, 2]" in (complain_of_hooks(said, (0, 2)) or "")
    assert complain_of_hooks(HooksInForce(steps=(0, 4)).add_to({}), (0, 4)) is None


@pytest.mark.parametrize(
    ("setting", "named"), [("pp_size", "pipeline stages"), ("attn_dp_size", "attention DP")]
)
def test_divisions_that_our_worker_cannot_follow_are_refused_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, named: str
) -> None:
    chosen = sglang_launcher._arguments  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        sglang_launcher, "_arguments", lambda options: {**chosen(options), setting: 2, "tp_size": 2}
    )
    model = save_model(tmp_path / "policy", seed=1)
    options = sglang_launcher.Options(
        model=model, device=torch.device("cpu"), dtype=torch.float32, slots=2, max_context=64
    )
    with pytest.raises(ConfigError, match=rf"{named} \({setting}: 2\) doesn't work with TLT"):
        sglang_launcher.start(options, tmp_path / "log")
