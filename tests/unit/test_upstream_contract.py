"""The check of SGLang's source, which `make check` runs, says what a change of upstream breaks."""

import pytest

from tests.sglang_contract import RELIED_ON, Source, complaints, installed

WORKER = "speculative/eagle_worker_v2.py"
CHANGES = [
    (WORKER, "def on_verify_complete_cpu(", "def on_verified(", "on_verify_complete_cpu"),
    (WORKER, "self, batch_size: int) -> None", "self, rows: int) -> None", "parameter batch_size"),
    (WORKER, "self.activate_step_by_batch(", "self.activate(", "doesn't call activate_step_by_b"),
    ("speculative/eagle_info.py", "topk_index", "top_index", "no EagleDraftInput.topk_index"),
    ("managers/io_struct.py", "cache_salt", "salted", "no GenerateReqInput.cache_salt"),
]


@pytest.mark.parametrize(("file", "old", "new", "complaint"), CHANGES)
def test_says_which_change_breaks_what(file: str, old: str, new: str, complaint: str) -> None:
    text = (installed() / file).read_text()
    assert old in text
    found = complaints(Source(installed(), {file: text.replace(old, new)}))
    assert any(complaint in line and "which breaks" in line for line in found)


def test_lists_the_scheduler_the_drafter_and_the_engine() -> None:
    listed = {name.file for name in RELIED_ON}
    assert {"managers/scheduler.py", "speculative/eagle_info.py", "entrypoints/engine.py"} <= listed
