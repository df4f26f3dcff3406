"""A job whose committed files are in an S3 bucket goes on from there, and other jobs do."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import free_port
from tests.e2e.live import Live, kill, processes_of, wait_until, write_spec
from tests.s3_server import BUCKET, S3Server
from tlt.policies.run.blob_retention import needed_blobs
from tlt.runs.run_folder_reader import read_ledger
from tlt.session.session_files import blobs_in_flight, read_ready, short_folder

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture
def server() -> Iterator[S3Server]:
    server = S3Server(free_port())
    yield server
    server.close()


@pytest.fixture
def own(tmp_path: Path, server: S3Server) -> Iterator[Live]:
    session = Live(tmp_path)
    session.environment |= server.environment
    _up(session, "--blobs", f"s3://{BUCKET}/tlt/")
    yield session
    session.tlt("down")


def _up(session: Live, *options: str) -> None:
    shape = ("--workers", "1", "--ranks", "2", "--no-dashboard")
    session.tlt("up", *shape, "--runs", str(session.runs), *options)


def _folder(session: Live) -> Path:
    return session.home / "tlt" / "sessions" / "default"


def test_a_job_goes_on_from_a_bucket_once_it_answers(
    own: Live, server: S3Server, raw_spec: dict[str, Any]
) -> None:
    algorithm = {**raw_spec["algorithm"], "steps": 4, "shards": "all"}
    rollout = {"max_new_tokens": 200, "slots": 4}
    training = {"speculation": {"mode": "adaptive"}, "drafter": {"train": "always"}}
    spec = {**raw_spec, "algorithm": algorithm, "rollout": rollout, **training}
    path = write_spec(own.home, spec)
    job = own.submit(path)
    # after a checkpoint and one more update that no checkpoint holds
    own.await_phase(job, "rollout", step=3)
    ready = read_ready(_folder(own))
    assert ready is not None
    kill(ready.pid)
    wait_until(
        lambda: not [each for each in processes_of(own) if "tlt." in each or "redis" in each],
        "ranks and Redis to end with their supervisor",
    )
    shutil.rmtree(blobs_in_flight(short_folder(_folder(own))), ignore_errors=True)

    server.tell("stop")
    _up(own)  # the job knows where its files are
    wait_until(lambda: own.status(job) == "paused", f"{job} to be paused")
    complaint = (
        f"{job} is paused for .*: s3://{BUCKET}/tlt/{job}-.*: cannot be read: Could not conn"
    )
    assert re.search(complaint, own.tlt("status").stdout)
    server.tell("start")
    assert own.await_end(job)["status"] == "done", own.job(job)["error"]
    assert [step.rollouts for step in own.fold(job).steps] == [32] * 4

    needed = {blob.digest for blob in needed_blobs(read_ledger(own.runs / job).state)}
    wait_until(
        lambda: {key.rpartition("/")[2] for key in server.objects()} == needed,
        "what the job doesn't need any more to be deleted",
    )
    assert not (own.runs / job / "blobs").exists()
    own.tlt("export", "policy", job, str(own.home / "policy"))
    assert (own.home / "policy" / "model.safetensors").stat().st_size > 0

    following = own.submit(path, "algorithm.steps=5", start=f"{job}@4")
    assert own.await_end(following)["status"] == "done", own.job(following)["error"]
    snapshot = own.fold(following)
    assert (snapshot.starts_from, snapshot.version) == (f"{job}@4", 5)
    # this session was not told to use a bucket
    assert (own.runs / following / "blobs").is_dir()

    secret = server.environment["AWS_SECRET_ACCESS_KEY"].encode()
    files = (file for file in own.home.rglob("*") if file.is_file())
    assert [file for file in files if secret in file.read_bytes()] == []
