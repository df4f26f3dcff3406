"""A model's folder is data: no Python of it runs, and nothing of it is unpickled."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.session import write_policy
from tests.unit.test_reward_model import save
from tlt.errors import ConfigError, UnsupportedModel
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.tokenizer import Tokenizer
from tlt.rewards.kinds.reward_model import RewardModel
from tlt.spec.reward import RewardSpec
from tlt.trainer.policy.model.model_loading import load_model, outline_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_policy(tmp_path / "model", layers=1)


def _change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_python_in_a_models_folder_is_not_run(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (model / "own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    _change(model / "config.json", model_type="own", architectures=["Model"], auto_map=auto)
    _change(
        model / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["own.Own", None]},
    )
    with pytest.raises(UnsupportedModel):
        load_model(str(model), torch.device("cpu"))
    with pytest.raises(UnsupportedModel):
        outline_model(str(model), torch.float32)
    with pytest.raises(ConfigError):
        Tokenizer(str(model))
    assert not trace.exists()


class _Trace:
    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> Any:
        return open, (self.file, "w")


def test_no_weights_of_a_policy_are_unpickled(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(_Trace(tmp_path / "trace")))
    with pytest.raises(UnsupportedModel, match="safetensors"):
        load_model(str(model), torch.device("cpu"))
    with pytest.raises(ConfigError, match="safetensors"):
        load_decoder(model, torch.float32)
    assert not (tmp_path / "trace").exists()


def test_nothing_but_weights_of_a_reward_model_is_unpickled(tmp_path: Path) -> None:
    folder, trace = save(tmp_path / "judge"), tmp_path / "trace"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    spec = RewardSpec(kind="model", path=str(folder))
    assert RewardModel(spec)
    torch.save(weights | {"score.bias": _Trace(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        RewardModel(spec)
    assert not trace.exists()


def test_no_python_in_a_reward_models_folder_is_run(tmp_path: Path) -> None:
    folder, trace = save(tmp_path / "judge"), tmp_path / "trace"
    (folder / "own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    auto = {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Model"}
    _change(folder / "config.json", model_type="own", auto_map=auto)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        RewardModel(RewardSpec(kind="model", path=str(folder)))
    assert not trace.exists()


def test_an_index_of_weights_names_no_file_elsewhere(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(tmp_path / "other.safetensors")
    index = {"weight_map": {"lm_head.weight": "../other.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"index\.json"):
        load_decoder(model, torch.float32)
    names = load_file(tmp_path / "other.safetensors")
    whole = {"metadata": {}, "weight_map": dict.fromkeys(names, "../other.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(whole))
    with pytest.raises(UnsupportedModel):
        load_model(str(model), torch.device("cpu"))
