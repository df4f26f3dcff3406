"""A rank on a GPU frees its engine's cache for a policy update, and decodes again afterwards."""

from pathlib import Path

import msgspec

from tests.labelled_device import labelled_device
from tests.ranks.members import decoding_of, engine_of, member_spec
from tests.ranks.ranks import LocalRank, local_rank, open_job
from tests.ranks.test_policy_update import UPDATE
from tests.samples import JOB, prompt
from tlt.protocol.events import RolloutFinished
from tlt.protocol.rank_messages import DecodePrompts
from tlt.protocol.refs import MinibatchShare, SampleRef


def decode_all(local: LocalRank) -> list[RolloutFinished]:
    prompts = tuple(prompt(7, member=member) for member in range(4))
    local.rank.handle(DecodePrompts(job=JOB, prompts=prompts))
    done: list[RolloutFinished] = []
    while engine_of(local.rank).running:
        done += decoding_of(local.rank).rollout.step()
    return done


def test_the_cache_is_freed_for_an_update(tmp_path: Path) -> None:
    with labelled_device(), local_rank(tmp_path, device="cuda:0") as local:
        local.rank.handle(open_job(tmp_path, member_spec(tmp_path, most_tokens=24)))
        done = decode_all(local)
        refs = tuple(
            SampleRef(
                prompt=each.prompt,
                member=each.member,
                reward=0.5 + 0.5 * (-1.0) ** number,
                advantage=(-1.0) ** number,
                answer=each.answer,
            )
            for number, each in enumerate(done)
        )
        tokens = sum(each.length for each in done)
        share = MinibatchShare(ranks=(refs,), total_tokens=tokens, total_sequences=len(done))
        held = engine_of(local.rank).memory_bytes
        local.rank.handle(msgspec.structs.replace(UPDATE, world=1, minibatches=(share,)))
        assert engine_of(local.rank).memory_bytes < held
        again = decode_all(local)
        assert len(again) == 4
        assert {each.prompt_length for each in again} == {len(prompt(7).tokens)}
        assert engine_of(local.rank).memory_bytes == held
