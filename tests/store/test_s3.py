"""Committed blobs go through an S3 server as users have one."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.s3_server import BUCKET, S3Server
from tlt.blobs.blob_files import StoredBlobs
from tlt.blobs.blob_url_store import BlobStore, open_store
from tlt.errors import BlobLost, ConfigError, StoreUnreachable

URL = f"s3://{BUCKET}/folder"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server(free_port())
    yield server
    server.close()


@pytest.fixture(autouse=True)
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


def test_hosts_share_blobs_until_they_are_discarded(s3: S3Server, tmp_path: Path) -> None:
    ours, theirs = (StoredBlobs(tmp_path / name, BlobStore(f"{URL}/a")) for name in ("1", "2"))
    ref = ours.put(b"weights", commit=True)
    assert theirs.get(ref) == b"weights"
    assert theirs.read_committed(ref, 2, 3) == b"igh"
    other_job = StoredBlobs(tmp_path / "3", BlobStore(f"{URL}/b"))
    other_job.share(ref, theirs)
    left = ours.put(b"of an attempt that failed", commit=True)
    assert ours.committed_names() == {ref.digest, left.digest}
    ours.discard_all_but([ref])
    assert {f"folder/{job}/{ref.digest}" for job in ("a", "b")} <= set(s3.objects())
    assert f"folder/a/{left.digest}" not in s3.objects()
    ours.discard(ref)
    theirs.release(ref)
    with pytest.raises(BlobLost, match="is gone"):
        theirs.get(ref)
    assert other_job.get(ref) == b"weights"


def test_a_server_that_is_down_is_waited_for(s3: S3Server, tmp_path: Path) -> None:
    blobs = StoredBlobs(tmp_path, open_store(f"{URL}/c"))
    ref = blobs.put(b"weights", commit=False)
    s3.tell("stop")
    with pytest.raises(StoreUnreachable, match="cannot be read: Could not connect"):
        blobs.commit(ref)
    with pytest.raises(StoreUnreachable):
        blobs.check_place()
    s3.tell("start")
    blobs.check_place()
    blobs.commit(ref)
    assert f"folder/c/{ref.digest}" in s3.objects()


def test_a_server_that_is_frozen_is_given_up(s3: S3Server) -> None:
    store = BlobStore(URL, answer_seconds=1.0)
    store.check()
    with s3.frozen(), pytest.raises(StoreUnreachable, match="cannot be written: no answer for 1 s"):
        store.check()
    store.check()


def test_refuses_a_bucket_that_is_missing() -> None:
    with pytest.raises(ConfigError, match="--blobs s3://none: cannot be written: The specified bu"):
        open_store("s3://none")


@pytest.mark.parametrize(
    ("allowed", "complaint"),
    [
        (["s3:ListBucket", "s3:GetObject"], "cannot be written: Access Denied"),
        (["s3:PutObject", "s3:GetObject", "s3:DeleteObject"], "cannot be listed: Access Denied"),
        (["s3:PutObject", "s3:ListBucket", "s3:DeleteObject"], "cannot be read: Forbidden"),
        (
            ["s3:PutObject", "s3:ListBucket", "s3:GetObject"],
            "cannot be deleted from: Access Denied",
        ),
    ],
)
def test_refuses_a_bucket_that_one_may_not_use(
    s3: S3Server, allowed: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    iam, name = s3.client("iam"), "-".join(action[3:] for action in allowed)
    iam.create_user(UserName=name)
    rights = [{"Effect": "Allow", "Action": allowed, "Resource": "*"}]
    document = json.dumps({"Version": "2012-10-17", "Statement": rights})
    iam.put_user_policy(UserName=name, PolicyName=name, PolicyDocument=document)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    s3.tell("guard")
    code = f"from tlt.blobs.blob_url_store import open_store; open_store({URL!r})"
    try:  # the connections of this process have other keys
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    finally:
        s3.tell("unguard")
    assert done.stderr.strip().splitlines()[-1] == (
        f"tlt.errors.ConfigError: --blobs {URL}: {complaint}"
    )
