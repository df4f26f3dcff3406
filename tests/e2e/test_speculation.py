"""A job draws the same answers with and without speculation, and reports its strategies."""

from pathlib import Path

import pytest
import torch

from tests.e2e.live import Live, wait_until
from tlt.base.strategies import Draft, Ngram, Off
from tlt.blobs.answer_files import Answer, AnswerFiles
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.drafter_folder import save_drafter
from tlt.models.eagle_drafter import DrafterConfig, new_drafter
from tlt.protocol.events import (
    DecodingReported,
    DrafterRefused,
    RolloutFinished,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
PROPOSING = ("speculation.mode=static", "speculation.strategy={type: draft, depth: 2}")
CHOOSING = ("speculation.mode=adaptive", "speculation.depths=[2]", "speculation.ngrams=[3]")


def write_drafter(policy: Path, folder: Path) -> Path:
    config = load_decoder(policy).config
    torch.manual_seed(0)
    drafter = new_drafter(
        DrafterConfig(
            layout="eagle",
            hidden=config.hidden,
            intermediate=config.intermediate,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            rope=config.rope,
            max_positions=config.max_positions,
            vocabulary=config.vocabulary,
            captured=(config.layers,),
        )
    )
    save_drafter(drafter, folder)
    return folder


def first_answers(live: Live, job: str) -> dict[tuple[int, int], Answer]:
    """Return the answers of step 0, whose policy doesn't depend on updates."""
    answers = AnswerFiles(live.runs / job)
    found = [entry.event for entry in live.journal(job) if isinstance(entry.event, RolloutFinished)]
    return {
        (r.prompt, r.member): answers.read(r.answer)
        for r in found
        if r.step == 0 and r.purpose == "train"
    }


def test_draws_the_same_answers_as_without_speculation(
    live: Live, spec: Path, policy: Path, tmp_path: Path
) -> None:
    drafter = write_drafter(policy, tmp_path)
    plain = live.submit(spec)
    # control runs start at random
    always = (*PROPOSING, "speculation.control_share=0")
    speculating = live.submit(spec, *always, f"drafter.path={drafter}")
    for job in (plain, speculating):
        live.tlt("logs", job, "-f")
        assert live.job(job)["status"] == "done"
    expected, found = (first_answers(live, job) for job in (plain, speculating))
    assert {key: r.text for key, r in found.items()} == {key: r.text for key, r in expected.items()}
    for answer in found.values():
        both = (answer.drafters, answer.origins)
        tokens = len(answer.tokens)
        assert [sum(span.tokens for span in spans) for spans in both] == [tokens] * 2
        assert [span.version for span in answer.drafters] == [0]
        assert {span.origin for span in answer.origins} <= {"accepted", "corrected"}
    events = [entry.event for entry in live.journal(speculating)]
    tallies = [t for e in events if isinstance(e, DecodingReported) for t in e.tallies]
    assert {tally.strategy for tally in tallies if tally.control is None} == {Draft(depth=2)}
    assert {tally.drafter for tally in tallies if tally.control is None} == {0}
    assert sum(tally.tokens for tally in tallies) >= sum(len(r.tokens) for r in found.values())
    assert not any(isinstance(event, DrafterRefused) for event in events)

    account = live.json("ledger", speculating)
    assert {part["drafter"] for part in account["acceptance"]} == {0}
    for step in account["accounts"]:
        for duties in step["workers"].values():
            assert sum(duties.values()) == pytest.approx(step["seconds"])
    assert "trained on" in live.tlt("ledger", str(live.runs / speculating)).stdout
    live.tlt("ledger", "unknown-1", code=2)


def test_goes_without_a_drafter_that_cannot_be_used(
    live: Live, spec: Path, policy: Path, tmp_path: Path
) -> None:
    torn = write_drafter(policy, tmp_path) / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    job = live.submit(spec, *CHOOSING, "algorithm.steps=1", f"drafter.path={tmp_path}")
    assert live.await_end(job)["status"] == "done", live.job(job)["error"]
    events = [entry.event for entry in live.journal(job)]
    refusals = [event for event in events if isinstance(event, DrafterRefused)]
    assert refusals
    assert all("safetensors" in event.error for event in refusals)
    assert "decodes without the drafter" in live.tlt("logs", job).stdout
    assert f"refused by {refusals[0].worker}: " in live.tlt("ledger", job).stdout
    tallies = [t for e in events if isinstance(e, DecodingReported) for t in e.tallies]
    assert {tally.strategy for tally in tallies} <= {Off(), Ngram(tokens=3)}


def test_gives_up_speculation_that_costs_more_than_it_saves(
    live: Live, long_spec: Path, policy: Path, tmp_path: Path
) -> None:
    """A random drafter proposes, and nearly half of the decode steps are control runs."""
    drafter = write_drafter(policy, tmp_path)
    costly = (
        "speculation.mode=static",
        "speculation.strategy={type: draft, depth: 12}",
        "speculation.control_share=0.45",
        f"drafter.path={drafter}",
        "algorithm.steps=100000",
    )
    job = live.submit(long_spec, *costly)
    live.await_phase(job, "rollout")
    wait_until(lambda: bool(live.fold(job).gave_up), "speculation to be given up")
    without = live.fold(job).step + 1
    live.await_phase(job, "policy_update", without)
    live.tlt("cancel", job)
    assert live.await_end(job)["status"] == "cancelled"
    assert "speculation is off for" in live.tlt("logs", job).stdout
    snapshot = live.fold(job)
    assert snapshot.savings is not None
    assert snapshot.savings.total.high is not None
    assert snapshot.savings.total.high < 0
    reports = [e.event for e in live.journal(job) if isinstance(e.event, DecodingReported)]
    tallies = [tally for report in reports if report.step == without for tally in report.tallies]
    assert {tally.strategy for tally in tallies} == {Off()}
