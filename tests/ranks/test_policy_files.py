"""Weights that only engines read are published in their format; checkpoints keep float32."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open

from tests.ranks.ranks import rank_job, with_policy
from tests.trainer.models import CPU, spec
from tlt.config import PolicySpec
from tlt.models.safetensors_io import read_weights, stream_weights
from tlt.ranks.policy_files import PolicyFiles
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_what_other_readers_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"matrix": torch.randn(3, 5), "vector": torch.randn(7), "number": torch.randn(())}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    stream_weights(tmp_path / "file", shapes, tensors.items(), dtype)
    with safe_open(tmp_path / "file", framework="pt") as found:
        for name, tensor in tensors.items():
            assert torch.equal(found.get_tensor(name), tensor.to(dtype))
