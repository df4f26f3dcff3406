"""peft loads the adapter that a rank stores, engines decode with it, and trainers resume it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engine.conftest import save_model
from tests.engine.reference import answers, new_request, random_prompts, show
from tests.ranks.ranks import rank_job
from tests.samples import SPEC
from tests.trainer.models import CPU, copies, never_interrupt, samples, spec, whole
from tlt.base.id_types import JobId, PolicyVersion
from tlt.engine.native import NativeEngine
from tlt.errors import ConfigError
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.safetensors_io import read_weights
from tlt.protocol.refs import Checkpoint
from tlt.ranks.policy_files import PolicyFiles
from tlt.report import Ledger, StoredPolicy
from tlt.runs.export.policy_export import export_adapter, export_policy
from tlt.spec.config import JobSpec, LoraSpec, PolicySpec
from tlt.trainer.policy.model.trained_part import TrainedPart
from tlt.trainer.policy.policy_learner import PolicyLearner

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, untied": {"tie_word_embeddings": False, "attention_bias": True},
    "qwen2": {"family": "qwen2"},
    "qwen2, untied": {"family": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"family": "qwen3", "head_dim": 24},
    "qwen3, untied": {"family": "qwen3", "tie_word_embeddings": False},
}
VERSION = PolicyVersion(3)


def job_spec(folder: Path, lora: LoraSpec | None = None, dtype: Any = "float32") -> JobSpec:
    policy = PolicySpec(path=str(folder), lora=lora or LoraSpec(rank=4), dtype=dtype)
    return msgspec.structs.replace(SPEC, policy=policy)


def learner_of(job: JobSpec) -> PolicyLearner:
    settings = spec(learning_rate=2e-2, attention="padded")
    part = TrainedPart(lora=job.policy.lora, seed=job.seed)
    return PolicyLearner(job.policy.path, settings, None, CPU, part=part)


def learn(learner: PolicyLearner, *steps: int) -> None:
    for step in steps:
        learner.update(step, [whole(samples(6, seed=step))], None, never_interrupt)


def put(files: PolicyFiles, learner: PolicyLearner) -> Checkpoint:
    weights = files.put_weights(learner, 0, True)
    assert weights is not None
    return Checkpoint(
        version=VERSION,
        weights=weights,
        adapter=files.put_adapter(learner, 0, True),
        **files.put_optimiser(learner, 0, None, "update"),
    )


def stored(checkpoint: Checkpoint) -> StoredPolicy:
    adapter = checkpoint.adapter
    return StoredPolicy(version=VERSION, weights=checkpoint.weights, adapter=adapter)


def loaded(folder: Path | str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_and_merged_policy_are_the_same_model(tmp_path: Path, family: str) -> None:
    # logits of about one: float32 rounds larger ones by more than is allowed here
    base = save_model(tmp_path / "base", 3, initializer_range=0.08, **FAMILIES[family])
    job = job_spec(base)
    learner = learner_of(job)
    learn(learner, 0, 1)
    checkpoint = put(PolicyFiles(rank_job(tmp_path / "run", job)), learner)
    ledger = Ledger(JobId("job"), job)
    export_policy(tmp_path / "run", ledger, stored(checkpoint), tmp_path / "merged")
    export_adapter(tmp_path / "run", job, stored(checkpoint), tmp_path / "adapter")
    merged, plain = loaded(tmp_path / "merged"), loaded(base)
    adapted = PeftModel.from_pretrained(loaded(base), tmp_path / "adapter").eval()
    tokens = torch.randint(0, 97, (4, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: Tensor = merged(tokens).logits
        torch.testing.assert_close(adapted(tokens).logits, logits, rtol=0, atol=1e-5)
        assert (plain(tokens).logits - logits).abs().max() > 0.05

    engine = NativeEngine(load_decoder(base), show, 4, 128, CPU, PolicyVersion(0), ())
    prompts = random_prompts(4, shortest=5)
    first = answers(engine, [new_request(n, prompt) for n, prompt in enumerate(prompts)])
    engine.swap_weights(VERSION, learner.weights())
    done = answers(engine, [new_request(n, prompt) for n, prompt in enumerate(prompts)])
    assert any(done[n].tokens != first[n].tokens for n in done)
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = adapted.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
        )
        assert list(done[number].tokens) == out[0, len(prompt) :].tolist()


def test_the_adapters_folder_is_that_of_peft(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", seed=3)
    job = job_spec(base, LoraSpec(rank=8, alpha=24, dropout=0.1))
    checkpoint = put(PolicyFiles(rank_job(tmp_path / "run", job)), learner_of(job))
    export_adapter(tmp_path / "run", job, stored(checkpoint), tmp_path / "adapter")
    files = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (8, 24, 0.1)
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert sorted(config["target_modules"]) == sorted(projections)


@pytest.mark.parametrize("commit", [False, True])
def test_engines_get_weights_that_were_merged_in_float32(tmp_path: Path, commit: bool) -> None:
    job = job_spec(save_model(tmp_path / "base", seed=3), dtype="bfloat16")
    learner, run = learner_of(job), rank_job(tmp_path / "run", job)
    learn(learner, 0)
    ref = PolicyFiles(run).put_weights(learner, 0, commit)
    assert ref is not None
    found = read_weights(run.blobs(), ref)
    expected = torch.float32 if commit else torch.bfloat16
    assert found.keys() == learner.weights().keys()
    for name, tensor in learner.weights().items():
        assert tensor.dtype is torch.float32
        assert torch.equal(found[name], tensor.to(expected))


def test_a_new_trainer_goes_on_to_the_bit(tmp_path: Path) -> None:
    job = job_spec(save_model(tmp_path / "base", seed=3))
    learner, files = learner_of(job), PolicyFiles(rank_job(tmp_path / "run", job))
    learn(learner, 0, 1)
    checkpoint = put(files, learner)
    other = learner_of(job)
    learn(other, 7)
    files.restore(other, checkpoint, None)
    for each in (learner, other):
        learn(each, 2)
    kept = [copies(x.adapter() | x.optimiser_state() | dict(x.weights())) for x in (learner, other)]
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(tensor, kept[1][name]) for name, tensor in kept[0].items())


def test_refuses_a_checkpoint_of_whole_weights(tmp_path: Path) -> None:
    job = job_spec(save_model(tmp_path / "base", seed=3))
    learner, files = learner_of(job), PolicyFiles(rank_job(tmp_path / "run", job))
    checkpoint = msgspec.structs.replace(put(files, learner), adapter=None)
    with pytest.raises(ConfigError, match="no adapter to go on with"):
        files.restore(learner, checkpoint, None)
    with pytest.raises(ConfigError, match="no adapter"):
        export_adapter(tmp_path / "run", job, stored(checkpoint), tmp_path / "adapter")
