"""Weights that only engines read are published in their format; checkpoints keep float32."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open

from tests.ranks.ranks import rank_job, with_policy
from tests.trainer.models import CPU, spec
from tlt.base.id_types import PolicyVersion
from tlt.blobs.blob_files import place_blobs
from tlt.models.safetensors_io import read_weights, stream_weights
from tlt.protocol.refs import Checkpoint
from tlt.ranks.policy_files import PolicyFiles
from tlt.ranks.rank_job_context import RankJob
from tlt.spec.config import PolicySpec
from tlt.trainer.policy.policy_learner import PolicyLearner


@pytest.mark.parametrize("decoded", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("commit", [False, True])
def test_publishes_what_engines_decode_with(
    tmp_path: Path, decoded: torch.dtype, commit: bool
) -> None:
    job_spec = with_policy(tmp_path)
    path = job_spec.policy.path
    name = "bfloat16" if decoded is torch.bfloat16 else "float32"
    job_spec = msgspec.structs.replace(job_spec, policy=PolicySpec(path=path, dtype=name))
    job = rank_job(tmp_path, job_spec)
    learner = PolicyLearner(path, spec(), None, CPU)
    ref = PolicyFiles(job).put_weights(learner, 0, commit)
    assert ref is not None
    expected = torch.float32 if commit else decoded
    for tensor_name, tensor in read_weights(job.blobs(), ref).items():
        assert tensor.dtype is expected
        assert torch.equal(tensor, learner.weights()[tensor_name].to(expected))


def test_keeps_no_copy_of_an_optimiser_that_a_store_has(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    job_spec = with_policy(tmp_path)
    job = rank_job(tmp_path, job_spec)
    run = Path(job.opened.folder)
    run.mkdir(exist_ok=True)
    place_blobs(run, f"local://{tmp_path}/store")
    learner, again = (PolicyLearner(job_spec.policy.path, spec(), None, CPU) for _ in range(2))
    files = PolicyFiles(job)
    weights = files.put_weights(learner, 0, commit=True)
    saved = files.put_optimiser(learner, 0, None, "0.0.0")
    assert weights is not None
    assert _copies(job) == {weights.digest}
    files.restore(again, Checkpoint(version=PolicyVersion(1), weights=weights, **saved), None)
    assert saved["optimiser"] is not None
    assert _copies(job) == {weights.digest, saved["optimiser"].digest}
    files.release_restored()
    assert _copies(job) == {weights.digest}
    assert again.optimiser_state().keys() == learner.optimiser_state().keys()


def _copies(job: RankJob) -> set[str]:
    return {path.name for path in job.flight.iterdir() if path.name[0] != "."}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_what_other_readers_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"matrix": torch.randn(3, 5), "vector": torch.randn(7), "number": torch.randn(())}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    stream_weights(tmp_path / "file", shapes, tensors.__getitem__, dtype)
    with safe_open(tmp_path / "file", framework="pt") as found:
        for name, tensor in tensors.items():
            assert torch.equal(found.get_tensor(name), tensor.to(dtype))
