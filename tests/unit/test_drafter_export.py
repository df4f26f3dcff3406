"""An exported drafter has the shape of its weights, whatever drafter the spec names."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.samples import SPEC
from tests.session import write_policy
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.blobs.blob_files import Blobs
from tlt.errors import ConfigError
from tlt.models.config_json import read_config
from tlt.models.decoder_spec import EMBEDDING, HEAD
from tlt.models.drafter_folder import save_drafter
from tlt.models.eagle_drafter import Drafter, architecture, new_drafter
from tlt.models.rope import PlainRope
from tlt.models.safetensors_io import put_weights
from tlt.protocol.refs import DrafterRef
from tlt.report import StoredPolicy
from tlt.runs.export.drafter_export import read_drafter, read_head, total_updates
from tlt.spec.config import DrafterSpec, JobSpec, PolicySpec
from tlt.trainer.drafter.initial_drafter import drafter_config_for


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_policy(tmp_path / "policy", layers=1)


def spec(policy: Path, named: Path | None) -> JobSpec:
    drafter = DrafterSpec(path=None if named is None else str(named), layout="eagle")
    return msgspec.structs.replace(SPEC, policy=PolicySpec(path=str(policy)), drafter=drafter)


def made(policy: Path, **changes: Any) -> Drafter:
    drafter = new_drafter(
        msgspec.structs.replace(drafter_config_for(read_config(policy), "eagle"), **changes)
    )
    for parameter in drafter.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    return drafter


def kept(run: Path, drafter: Drafter) -> DrafterRef:
    blobs = Blobs(run / "blobs", run / "blobs")
    return DrafterRef(
        version=DrafterVersion(3),
        weights=put_weights(blobs, drafter.state_dict(), commit=True),
        policy=PolicyVersion(2),
        architecture=architecture(drafter.config),
        updates=40,
        micro_batches=60,
    )


def test_ignores_a_named_drafter_that_does_not_fit(tmp_path: Path, policy: Path) -> None:
    trained, run = made(policy), tmp_path / "run"
    used = kept(run, trained)
    turned = tmp_path / "turned"
    save_drafter(made(policy, rope=PlainRope(theta=7.0)), turned, updates=500)
    for named in (None, turned, tmp_path / "nowhere"):
        drafter = read_drafter(run, spec(policy, named), used)
        assert drafter.config == trained.config
        for name, tensor in trained.state_dict().items():
            assert torch.equal(drafter.state_dict()[name], tensor)
    assert total_updates(spec(policy, turned), used) == 40
    assert total_updates(spec(policy, tmp_path / "nowhere"), used) is None
    broken, folder = made(policy), tmp_path / "broken"
    broken.fc.weight.data[0, 0] = torch.nan
    save_drafter(broken, folder, updates=500)
    assert total_updates(spec(policy, folder), used) == 40


def test_takes_the_shape_and_updates_of_the_named_drafter(tmp_path: Path, policy: Path) -> None:
    trained, run = made(policy, intermediate=24), tmp_path / "run"
    named = tmp_path / "named"
    save_drafter(trained, named, updates=500)
    used = kept(run, trained)
    assert read_drafter(run, spec(policy, named), used).config == trained.config
    assert total_updates(spec(policy, named), used) == 540


def test_reads_drafters_of_this_and_of_earlier_versions_with_a_large_vocabulary(
    tmp_path: Path, policy: Path
) -> None:
    half = msgspec.structs.replace(
        spec(policy, None), drafter=DrafterSpec(layout="eagle", hot_tokens=16)
    )
    for trained in (made(policy, hot_tokens=16), made(policy)):
        used = kept(tmp_path / "run", trained)
        assert read_drafter(tmp_path / "run", half, used).config == trained.config


@pytest.mark.parametrize("tied", [True, False])
def test_reads_the_head_of_the_newest_policy(tmp_path: Path, policy: Path, tied: bool) -> None:
    weights = load_file(policy / "model.safetensors")
    newest = {EMBEDDING: weights[EMBEDDING] + 1}
    if not tied:
        newest[HEAD] = weights[HEAD] + 2
    run = tmp_path / "run"
    ref = put_weights(Blobs(run / "blobs", run / "blobs"), newest, commit=True)
    stored = StoredPolicy(version=PolicyVersion(2), weights=ref)
    expected = newest[EMBEDDING] if tied else newest[HEAD]
    assert torch.equal(read_head(run, stored, policy), expected)
    assert torch.equal(read_head(run, None, policy), weights[HEAD])


def test_refuses_weights_of_an_unknown_shape(tmp_path: Path, policy: Path) -> None:
    run = tmp_path / "run"
    used = kept(run, made(policy, intermediate=24))
    for named in (None, tmp_path / "gone"):
        with pytest.raises(ConfigError, match="shape is not that of a new one"):
            read_drafter(run, spec(policy, named), used)
