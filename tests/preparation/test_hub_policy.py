"""The process that prepares jobs finds a policy of the Hub, and says which commit it is."""

from pathlib import Path

import msgspec
import pytest

from tests.hub_cache import COMMIT, NAME, add_commit, use_cache
from tests.preparation.conftest import MODEL
from tlt.actors.coordinator.preparation_process import Preparer
from tlt.base.id_types import JobId
from tlt.protocol.events import JobPrepared, JobRefused
from tlt.protocol.shared_values import HubPolicy
from tlt.runs.run_folder_reader import read_spec
from tlt.spec.config import JobSpec, PolicySpec

JOB = JobId("job-1")


async def test_prepares_a_job_with_a_policy_of_the_cache(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache(monkeypatch, tmp_path / "home")
    folder = add_commit(tmp_path / "home", MODEL, COMMIT, "v1")
    named = msgspec.structs.replace(spec, policy=PolicySpec(path=NAME, revision="v1"))
    preparer, run = Preparer(ranks=1), tmp_path / "run"
    try:
        outcome = await preparer.prepare(JOB, named, run)
        other = msgspec.structs.replace(spec, policy=PolicySpec(path=NAME))
        refused = await preparer.prepare(JOB, other, tmp_path / "other")
    finally:
        await preparer.close()
    assert isinstance(outcome, JobPrepared), outcome
    assert outcome.prepared.hub_policy == HubPolicy(
        id=NAME, revision="v1", commit=COMMIT, folder=str(folder)
    )
    assert outcome.prepared.policy_weights > 0
    assert read_spec(run) == named
    assert isinstance(refused, JobRefused)
    assert refused.error.startswith(f"policy.path: {NAME} is no folder, nor whole in the cache")
