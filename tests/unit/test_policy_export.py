"""An exported policy loads elsewhere as it was trained, and says what it is."""

import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_reasoner.vocabulary import EOS
from tests.session import write_policy
from tests.simulation.specs import small_spec
from tests.simulation.walk import step
from tests.simulation.worker_events import JOB
from tests.simulation.world import World
from tlt.base.id_types import PolicyVersion
from tlt.blobs.blob_files import Blobs
from tlt.models.safetensors_io import put_weights
from tlt.protocol.shared_values import HubPolicy
from tlt.report import Ledger, StoredPolicy
from tlt.runs.export.policy_export import export_policy
from tlt.spec.config import DataSpec, PolicySpec
from tlt.spec.reward import RewardSpec
from tlt.store.journal import JournalEntry


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Return a policy as the Hub's cache holds it, with its authors' card."""
    folder = write_policy(tmp_path / "models--org--small" / "snapshots" / "1234", layers=1)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "README.md").write_text("---\nlicense: mit\ntags: [old]\n---\n# The authors' card\n")
    return folder


class Run:
    """A run of four steps whose policy after two of them is exported."""

    def __init__(self, tmp_path: Path, policy: Path) -> None:
        spec = msgspec.structs.replace(
            small_spec(steps=4, eval_every=2),
            policy=PolicySpec(path=str(policy)),
            data=DataSpec(train=f"{tmp_path}/train.jsonl", eval=f"{tmp_path}/eval.jsonl"),
            reward=(
                RewardSpec(kind="function", function=f"{tmp_path}/mine.py:score"),
                RewardSpec(kind="boxed", weight=0.5),
            ),
        )
        world, chooser = World(spec, [1, 1]), Random(0)
        while not world.ended:
            step(world, chooser, faults=0.0, overtaking=0.0)
        self.ledger = Ledger(JOB, spec)
        for line in world.journal:
            entry = msgspec.json.decode(line, type=JournalEntry)
            self.ledger.add(entry.event, entry.at)
        self.folder = tmp_path / "run"
        self.trained = {
            name: 1.01 * weight for name, weight in load_file(policy / "model.safetensors").items()
        }
        blobs = Blobs(self.folder / "blobs", self.folder / "blobs")
        ref = put_weights(blobs, self.trained, commit=True)
        self.stored = StoredPolicy(version=PolicyVersion(2), weights=ref)

    def export(self, folder: Path, dtype: Any = None) -> Path:
        export_policy(self.folder, self.ledger, self.stored, folder, dtype)
        return folder


@pytest.fixture
def run(tmp_path: Path, policy: Path) -> Run:
    return Run(tmp_path, policy)


def declare(policy: Path, **changes: Any) -> None:
    config = json.loads((policy / "config.json").read_text())
    config.pop("dtype", None)
    (policy / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("declared", "asked", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, None, torch.bfloat16),
        ({"dtype": "float16"}, None, torch.float16),
        ({}, None, torch.float32),
        ({"dtype": "bfloat16"}, "float32", torch.float32),
    ],
)
def test_weights_have_the_format_of_the_initial_policy_or_the_one_asked_for(
    run: Run, policy: Path, tmp_path: Path, declared: Any, asked: Any, expected: torch.dtype
) -> None:
    declare(policy, **declared)
    folder = run.export(tmp_path / "exported", asked)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == expected
    config = json.loads((folder / "config.json").read_text())
    assert config[next(iter(declared), "dtype")] == str(expected).removeprefix("torch.")
    for name, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(weight, run.trained[name].to(expected))


def test_the_folder_has_tokenizer_chat_template_and_the_ends_of_answers(
    run: Run, policy: Path, tmp_path: Path
) -> None:
    (policy / "generation_config.json").unlink()
    (policy / "pytorch_model.bin").write_bytes(b"initial weights")
    folder = run.export(tmp_path / "exported")
    messages = [{"role": "user", "content": "12+01="}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "12+01="
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == [EOS]
    tokens = tokenizer("12+01=", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=2, do_sample=False).shape[1] > 2
    assert not (folder / "pytorch_model.bin").exists()


def test_the_card_says_where_the_policy_comes_from_and_what_it_gained(
    run: Run, tmp_path: Path
) -> None:
    folder = run.export(tmp_path / "exported")
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {
        "license": "mit",
        "base_model": "org/small",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "grpo", "tlt"],
    }
    before, after, _ = run.ledger.evals
    assert f"{before.describe_score()} before, {after.describe_score()} after" in card.text
    first, second, *_ = run.ledger.steps
    assert f"{first.reward:.3f} in step 0, {second.reward:.3f} in step 1" in card.text
    assert "| steps | 2 of 4 |" in card.text
    spec = yaml.safe_load(card.text.split("```yaml\n")[1].split("```")[0])
    assert spec["policy"] == {"path": "1234"}
    assert spec["data"] == {"train": "train.jsonl", "eval": "eval.jsonl"}
    assert spec["reward"] == [
        {"kind": "function", "function": "mine.py:score"},
        {"kind": "boxed", "weight": 0.5},
    ]
    assert spec["algorithm"]["steps"] == 4
    assert "learning_rate" not in spec["algorithm"]
    assert str(tmp_path) not in (folder / "README.md").read_text()


def test_a_policy_of_the_hub_is_named_by_its_commit(run: Run, policy: Path, tmp_path: Path) -> None:
    run.ledger.hub_policy = HubPolicy(
        id="org/small", revision="v1", commit="1234", folder=str(policy)
    )
    text = (run.export(tmp_path / "exported") / "README.md").read_text()
    assert "| base model | org/small, commit `1234` |" in text
    spec = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert spec["policy"] == {"path": "org/small", "revision": "1234"}


def test_a_folder_of_unknown_origin_is_no_base_model(tmp_path: Path) -> None:
    """The Hub refuses a card whose base model is a local path."""
    run = Run(tmp_path, write_policy(tmp_path / "mine", layers=1))
    card = ModelCard.load(run.export(tmp_path / "exported") / "README.md")
    assert card.data.base_model is None
    assert "| base model | mine |" in card.text
