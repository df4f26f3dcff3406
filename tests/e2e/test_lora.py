"""A job with policy.lora publishes merged policies, and exports both them and its adapter."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.live import Live, kill
from tlt.protocol.events import CheckpointCommitted, PolicyPublished

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
_LORA = ("policy.lora.rank=4", "algorithm.kl_coefficient=0.01", "algorithm.learning_rate=1e-2")


def test_merged_policy_and_adapter_are_exported(
    live: Live, spec: Path, policy: Path, tmp_path: Path
) -> None:
    job = live.submit(spec, *_LORA)
    assert live.await_end(job)["status"] == "done", live.job(job)["error"]
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    live.tlt("export", "policy", job, str(merged))
    live.tlt("export", "policy", job, str(adapter), "--adapter")
    base = AutoModelForCausalLM.from_pretrained(policy)
    tokens = torch.arange(4, 14)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
        found = PeftModel.from_pretrained(base, adapter)(tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    events = [entry.event for entry in live.journal(job)]
    (saved,) = [event.checkpoint for event in events if isinstance(event, CheckpointCommitted)]
    published = [event.policy for event in events if isinstance(event, PolicyPublished)]
    assert saved.policy == published[-1]
    assert saved.adapter is not None
    assert saved.optimiser is not None
    assert saved.optimiser.bytes < saved.weights.bytes


def test_a_new_worker_goes_on_with_the_adapter(live: Live, long_spec: Path) -> None:
    job = live.submit(long_spec, *_LORA)
    live.await_phase(job, "rollout", step=1)
    kill(live.workers()["w1"].rank_pids[1])
    assert live.await_end(job)["status"] == "done", live.job(job)["error"]
    assert (live.fold(job).version, live.fold(job).losses) == (2, 1)
