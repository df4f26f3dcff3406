"""A rank chooses the sizes that a spec leaves open by its share of the answers and its memory."""

import shutil
from pathlib import Path

import msgspec

from tests.ranks.ranks import local_rank, open_job, rank_setup, with_policy
from tests.small_disk import small_disk
from tlt.base.strategies import Draft
from tlt.memory_plan import DevicePlan, Spread, make_plan
from tlt.memory_plan.host_memory import tap_bytes
from tlt.memory_plan.planned_devices import RESERVE
from tlt.protocol.commands import OpenJob
from tlt.protocol.events import SizesChosen
from tlt.protocol.shared_values import ChosenSizes, SizingFacts
from tlt.ranks.size_choice import SizeChoice, choose_for_rank, choose_sizes
from tlt.spec.config import (
    AlgorithmSpec,
    DrafterSpec,
    JobSpec,
    RolloutSpec,
    SpeculationSpec,
)

FACTS = SizingFacts(ranks=3, answers=64)
ONE = Spread(device="cpu")
# of the policy
POSITIONS = 512


def open_spec(folder: Path, **rollout: object) -> JobSpec:
    algorithm = AlgorithmSpec(steps=2, prompts_per_step=8, group_size=8)
    return with_policy(
        folder,
        algorithm=algorithm,
        rollout=msgspec.convert({"max_new_tokens": 60, **rollout}, RolloutSpec),
    )


def opened(folder: Path, spec: JobSpec, facts: SizingFacts = FACTS) -> OpenJob:
    return msgspec.structs.replace(open_job(folder, spec), sizing=facts)


def choice_in(spec: JobSpec, gigabytes: float) -> tuple[SizeChoice, DevicePlan]:
    memory = int(gigabytes * 1e9)
    device = DevicePlan(hosts=1, devices=1, memory=memory, kind="core", type="cpu")
    return choose_sizes(spec, FACTS, device, ONE), device


def test_an_engine_gets_its_share_of_a_rollout_batch(tmp_path: Path) -> None:
    spec = open_spec(tmp_path)
    command, choice = choose_for_rank(rank_setup(tmp_path), opened(tmp_path, spec))
    assert choice is not None
    assert command.spec.rollout.slots == choice.sizes.slots == 22
    assert command.spec.algorithm.microbatch_tokens == choice.sizes.microbatch_tokens
    assert choice.why.startswith("22 answers at once (its share of a rollout batch)")


def test_an_engine_that_may_take_all_answers_gets_slots_for_them(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, spread=False)
    command, _ = choose_for_rank(rank_setup(tmp_path), opened(tmp_path, spec))
    assert command.spec.rollout.slots == 64


def test_memory_bounds_slots_and_micro_batches(tmp_path: Path) -> None:
    spec = open_spec(tmp_path)
    policy = msgspec.structs.replace(spec.policy, max_context=4096)
    spec = msgspec.structs.replace(spec, policy=policy)
    ample, _ = choice_in(spec, 20)
    least = make_plan(
        msgspec.structs.replace(ample.fitting, slots=1, microbatch_tokens=512),
        *(DevicePlan(hosts=1, devices=1, memory=10**10, kind="core", type="cpu"), 1, 1),
    ).total
    choice, device = choice_in(spec, least * 1.2 / 1e9)
    job = choice.fitting
    assert make_plan(job, device, 1, 1).fits
    assert job.slots < ample.fitting.slots
    assert not make_plan(msgspec.structs.replace(job, slots=job.slots + 1), device, 1, 1).fits
    assert f"{job.slots} answers at once (what " in choice.why


def test_passes_become_smaller_before_slots_become_fewer(tmp_path: Path) -> None:
    spec = open_spec(tmp_path)
    spec = msgspec.structs.replace(
        spec, policy=msgspec.structs.replace(spec.policy, max_context=80)
    )
    ample, device = choice_in(spec, 20)
    total = make_plan(
        msgspec.structs.replace(ample.fitting, microbatch_tokens=512), device, 1, 1
    ).total
    choice, _ = choice_in(spec, total * 1.1 / 1e9)
    assert choice.fitting.slots == ample.fitting.slots
    assert 512 <= choice.fitting.microbatch_tokens < ample.fitting.microbatch_tokens
    assert "tokens a pass (what " in choice.why


def sglang_choice(folder: Path, gigabytes: float, **rollout: object) -> SizeChoice:
    spec = open_spec(folder, engine="sglang", **rollout)
    spec = msgspec.structs.replace(spec, speculation=SpeculationSpec(mode="off"))
    return choice_in(spec, gigabytes)[0]


def gigabytes_of(choice: SizeChoice, **changes: object) -> float:
    """Return what a device needs for the job with these changes."""
    device = DevicePlan(hosts=1, devices=1, memory=10**12, kind="core", type="cpu")
    job = msgspec.structs.replace(choice.fitting, microbatch_tokens=512, **changes)
    return make_plan(job, device, 1, 1).total / (1 - RESERVE) / 1e9


def test_sglang_caches_all_that_its_slots_may_need_where_there_is_room(tmp_path: Path) -> None:
    choice = sglang_choice(tmp_path, 50)
    assert choice.sizes.slots == 22
    assert choice.sizes.cache_tokens == 22 * POSITIONS
    assert "cached" not in choice.why


def test_sglangs_cache_becomes_smaller_before_slots_become_fewer(tmp_path: Path) -> None:
    ample = sglang_choice(tmp_path, 50)
    room = gigabytes_of(ample, cache_tokens=12 * POSITIONS) * 1.001
    choice = sglang_choice(tmp_path, room)
    cached = choice.sizes.cache_tokens
    assert cached is not None
    assert choice.sizes.slots == 22
    assert 12 * POSITIONS <= cached < 13 * POSITIONS
    assert f"{cached} tokens cached of the {22 * POSITIONS} that they may have" in choice.why
    few = sglang_choice(tmp_path, gigabytes_of(ample, cache_tokens=2 * POSITIONS))
    assert few.sizes.slots < 22
    assert few.fitting.pool_tokens >= few.sizes.slots * POSITIONS // 2


def test_shared_memory_bounds_slots_by_their_hidden_states(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, engine="sglang")
    with small_disk(tmp_path / "flight") as flight:
        command = opened(tmp_path, spec)
        _, choice = choose_for_rank(rank_setup(flight), command)
        assert choice is not None
        shared = shutil.disk_usage(flight).free // 2 // FACTS.ranks
    job = choice.fitting
    assert 1 < job.slots < 22
    assert tap_bytes(job) <= shared < tap_bytes(msgspec.structs.replace(job, slots=job.slots + 1))
    assert "whose hidden states half of the shared memory holds" in choice.why


def test_slots_and_cache_of_the_spec_stay(tmp_path: Path) -> None:
    choice = sglang_choice(tmp_path, 50, slots=32, cache_tokens=8 * POSITIONS)
    assert (choice.sizes.slots, choice.sizes.cache_tokens) == (32, 8 * POSITIONS)
    room = gigabytes_of(choice, cache_tokens=POSITIONS) * 1.001
    least = sglang_choice(tmp_path, room, slots=32)
    assert least.sizes.slots == 32
    assert POSITIONS <= (least.sizes.cache_tokens or 0) < 2 * POSITIONS


def test_a_drafter_that_cannot_be_read_does_not_end_the_job(tmp_path: Path) -> None:
    spec = open_spec(tmp_path)
    spec = msgspec.structs.replace(
        spec,
        speculation=SpeculationSpec(mode="static", strategy=Draft(depth=2)),
        drafter=DrafterSpec(path=str(tmp_path / "nowhere")),
    )
    command, choice = choose_for_rank(rank_setup(tmp_path), opened(tmp_path, spec))
    assert choice is not None
    assert command.spec.rollout.slots == 22
    assert command.spec.drafter == spec.drafter


def test_the_longest_prompt_and_answer_bound_the_context(tmp_path: Path) -> None:
    spec = open_spec(tmp_path)
    facts = msgspec.structs.replace(FACTS, longest_prompt=12)
    command, _ = choose_for_rank(rank_setup(tmp_path), opened(tmp_path, spec, facts))
    assert command.spec.policy.max_context == 72


def test_a_worker_keeps_what_it_has_chosen_before(tmp_path: Path) -> None:
    chosen = ChosenSizes(slots=7, microbatch_tokens=300)
    facts = msgspec.structs.replace(FACTS, chosen=chosen)
    command, choice = choose_for_rank(
        rank_setup(tmp_path), opened(tmp_path, open_spec(tmp_path), facts)
    )
    assert choice is not None
    assert choice.sizes == chosen
    assert command.spec.rollout.slots == 7


def test_sizes_of_the_spec_stay(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, slots=5)
    algorithm = msgspec.structs.replace(spec.algorithm, microbatch_tokens=100)
    command = opened(tmp_path, msgspec.structs.replace(spec, algorithm=algorithm))
    assert choose_for_rank(rank_setup(tmp_path), command) == (command, None)


def test_a_rank_reports_what_it_has_chosen(tmp_path: Path) -> None:
    with local_rank(tmp_path) as local:
        local.rank.handle(opened(tmp_path, open_spec(tmp_path)))
        (event,) = local.sent()
        assert isinstance(event, SizesChosen)
        assert event.sizes.slots == 22
        assert local.rank.duties is not None
        assert local.rank.duties.decoding is not None
        assert local.rank.duties.decoding.engine.slots == 22
