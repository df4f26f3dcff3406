"""The planner's figures for shared memory, and its copies of other modules' constants."""

import pytest

from tests.memory_plan.models import job_of
from tests.memory_plan.test_plans import SMALL, speculating, usual_job
from tlt.engine.native import drafter_proposer, prompt_prefill
from tlt.engine.sglang.client import start_engine_with_tap, weight_parts_and_checksums
from tlt.engine.sglang.shared import shared_hidden_state_buffer
from tlt.engine.sglang.shared.shared_hidden_state_buffer import TapShape
from tlt.memory_plan import (
    JobMemory,
    Spread,
    drafter_memory,
    engine_memory,
    host_items,
    host_memory,
    learner_memory,
)
from tlt.memory_plan.host_memory import tap_bytes
from tlt.ranks.drafter import member, merged_delta_tracker, micro_batch_time_limit
from tlt.trainer.drafter import chain_attention, interruptible_matmul
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.policy.model import logprobs


@pytest.mark.parametrize("job", [usual_job(SMALL), speculating(usual_job(SMALL))])
def test_a_tap_is_as_large_as_the_engine_makes_it(job: JobMemory) -> None:
    shape = TapShape(
        slots=2 * job.slots,
        positions=job.max_context,
        layers=job.captured,
        hidden=job.policy.hidden,
        dtype="bfloat16",
    )
    assert tap_bytes(job) == shape.bytes


def test_a_host_holds_what_its_ranks_share_once() -> None:
    job = speculating(usual_job(SMALL, engine="sglang"))
    one, eight = (
        {item.name: item.bytes for item in host_items(job, Spread(ranks_per_host=ranks))}
        for ranks in (1, 8)
    )
    assert eight["published policies"] == one["published policies"] == 6 * SMALL.weights
    for name in ("taps", "answers to train drafters on", "loading the policy"):
        assert eight[name] == 8 * one[name] > 0


def test_a_job_without_sglang_has_no_tap() -> None:
    assert "taps" not in {item.name for item in host_items(job_of(SMALL), Spread())}


def test_constants_are_those_of_the_modules_that_allocate() -> None:
    """The planner imports none of them, because they import torch."""
    pairs = [
        (learner_memory.CHUNK_LOGITS, logprobs.CHUNK_LOGITS),
        (learner_memory.BLOCK_LOGITS, logprobs.BLOCK_LOGITS),
        (learner_memory._PART_BYTES, weight_parts_and_checksums.PART_BYTES),
        (host_memory._PART_BYTES, weight_parts_and_checksums.PART_BYTES),
        (engine_memory._CHUNK, prompt_prefill.CHUNK),
        (engine_memory._MOST_PROMPTS, prompt_prefill.MOST_PROMPTS),
        (engine_memory._NARROW, drafter_proposer._NARROW),
        (drafter_memory.MOST_ROWS, micro_batch_time_limit._MOST_ROWS),
        (drafter_memory._STEPS, DrafterHyperparameters().steps),
        (drafter_memory._LEAST_SNAPSHOTS, merged_delta_tracker._LEAST_SNAPSHOTS),
        (drafter_memory._MOST_SNAPSHOTS, merged_delta_tracker._MOST_SNAPSHOTS),
        (drafter_memory._SNAPSHOT_BYTES, merged_delta_tracker.SNAPSHOT_BYTES),
        (drafter_memory._CPU_WORK, interruptible_matmul.CPU_WORK),
        (drafter_memory._GPU_FACTOR, interruptible_matmul._GPU_FACTOR),
        (drafter_memory._SCORE_COST, chain_attention._SCORE_COST),
        (drafter_memory._MOST_STORED, chain_attention.MOST_STORED),
        (host_memory._POLICIES, member._POLICIES),
        (host_memory._ROLLOUT_BYTES, member._ROLLOUT_BYTES),
        (host_memory._DELTAS, member._DELTAS),
        (host_memory._COLUMNS, shared_hidden_state_buffer._COLUMNS),
        (host_memory._PER_SLOT, shared_hidden_state_buffer._PER_SLOT),
        (host_memory._ALIGNMENT, shared_hidden_state_buffer._ALIGNMENT),
        (host_memory._SLOTS_PER_REQUEST, start_engine_with_tap._SLOTS_PER_REQUEST),
    ]
    for planned, actual in pairs:
        assert planned == actual
