"""Attention is measured once, set by the spec, or refused where it would be wrong."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from tests.trainer.models import (
    CPU,
    PATHS,
    VOCABULARY,
    needs_compiler,
    save_family,
    save_mistral,
    spec,
)
from tlt.errors import ConfigError
from tlt.kernels.training_kernels import TrainingKernels, load_kernels
from tlt.trainer.policy.model.micro_batches import pad
from tlt.trainer.policy.model.model_loading import load_model
from tlt.trainer.policy.model.packed_attention import NATIVE, PACKED
from tlt.trainer.policy.speed import attention_choice, layer_probe
from tlt.trainer.policy.speed.attention_choice import packing_misfit
from tlt.trainer.policy.speed.layer_probe import LayerProbe, decoder_layers, make_dummy_samples

NAMES = {"padded": "sdpa", "packed": PACKED, "native": NATIVE}
_build: Callable[[], TrainingKernels | None] = load_kernels.__wrapped__


def attention_of(folder: str, **changes: Any) -> tuple[str, bool]:
    model = load_model(folder, CPU)
    packed = attention_choice.set_attention(model, spec(**changes), 64, bfloat16=False)
    return str(model.config._attn_implementation), packed


@pytest.mark.parametrize("wanted", PATHS)
def test_spec_decides_the_attention(model_dir: str, wanted: str):
    with capture_logs() as logs:
        assert attention_of(model_dir, attention=wanted) == (NAMES[wanted], wanted != "padded")
    assert logs == []


def test_measures_once_per_process(model_dir: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_choice, "choices", {})
    with capture_logs() as logs:
        first, second = attention_of(model_dir), attention_of(model_dir)
    assert first == second
    (entry,) = logs
    assert NAMES[entry["attention"]] == first[0]
    kinds = {"padded", "packed"} | ({"native"} if load_kernels() else set())
    assert entry["measured"].keys() == kinds
    assert all(seconds > 0 for seconds in entry["measured"].values())


def test_takes_the_fastest_and_keeps_transformers_in_a_draw(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
):
    seconds = {"padded": 1.0, "packed": 0.99, "native": 0.98}
    monkeypatch.setattr(
        attention_choice, "layer_seconds", lambda *arguments: seconds[arguments[-1]]
    )
    monkeypatch.setattr(attention_choice, "choices", {})
    assert attention_of(model_dir) == ("sdpa", False)
    seconds["packed"] = 0.5
    monkeypatch.setattr(attention_choice, "choices", {})
    assert attention_of(model_dir) == (PACKED, True)


@pytest.mark.parametrize(
    "compiler",
    [
        "/nowhere/cc",
        "false",
        "cc -Dlogf=expf",
        "cc '",
        "cc -fvisibility=hidden",
        "sh -c 'exec sleep 60'",
    ],
)
def test_runs_without_a_working_compiler(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, compiler: str
):
    monkeypatch.setenv("CC", compiler)
    if "sleep" in compiler:
        monkeypatch.setattr("tlt.kernels.c_build.TIMEOUT_SECONDS", 0.2)
    with capture_logs() as logs:
        assert _build() is None
    assert len(logs) == 1
    monkeypatch.setattr(attention_choice, "load_kernels", lambda: None)
    monkeypatch.setattr(attention_choice, "choices", {})
    assert attention_of(model_dir)[0] in ("sdpa", PACKED)
    with pytest.raises(ConfigError, match="C compiler"):
        attention_of(model_dir, attention="native")


@needs_compiler
def test_building_kernels_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert _build() is not None
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_runs_without_a_folder_to_build_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with capture_logs() as logs:
        assert _build() is None
    assert len(logs) == 1


@needs_compiler
def test_builds_where_mapped_files_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def busy(*_: object, **__: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.unlink", busy)
    assert _build() is not None


@needs_compiler
def test_builds_kernels_in_inference_mode():
    with torch.inference_mode():
        assert _build() is not None


MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
NEO = {"attention_types": [[["global"], 2]], "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize(
    ("family", "changes", "fitting"),
    [
        # values narrower than keys
        ("youtu", MLA, {"padded", "packed"}),
        ("deepseek_v3", MLA | {"first_k_dense_replace": 2}, {"padded", "packed"}),
        # calls `view` on the output of attention
        ("jetmoe", {}, {"padded", "packed", "native"}),
        # have custom attention, which random weights hardly show
        ("gpt_neo", NEO, {"padded"}),
        ("codegen", GPT, {"padded"}),
    ],
)
def test_measures_only_attentions_that_fit_the_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: dict[str, Any],
    fitting: set[str],
):
    folder = save_family(tmp_path, family, **changes)
    fitting &= {"padded", "packed"} | ({"native"} if load_kernels() else set())
    monkeypatch.setattr(attention_choice, "choices", {})
    with capture_logs() as logs:
        attention_of(folder)
    (entry,) = logs
    assert entry["measured"].keys() == fitting
    for kind in {"packed", "native"} - fitting:
        with pytest.raises(ConfigError, match=r"does not fit|C compiler"):
            attention_of(folder, attention=kind)


def test_model_with_a_row_limit_stays_padded(model_dir: str, monkeypatch: pytest.MonkeyPatch):
    honest = LlamaAttention.forward

    def limited(attention: Any, *, hidden_states: torch.Tensor, **options: Any) -> Any:
        if hidden_states.shape[1] > 64:
            raise RuntimeError("longer than what it has a mask for")
        return honest(attention, hidden_states=hidden_states, **options)

    monkeypatch.setattr(LlamaAttention, "forward", limited)
    assert attention_of(model_dir, attention="packed", microbatch_tokens=64)[1]
    with pytest.raises(ConfigError, match="does not fit llama"):
        attention_of(model_dir, attention="packed", microbatch_tokens=128)


def test_measures_again_for_another_micro_batch_size(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention_choice, "choices", {})
    with capture_logs() as logs:
        for tokens in (64, 512, 64):
            attention_of(model_dir, microbatch_tokens=tokens)
    assert len(logs) == 2


def test_probes_a_layer_that_text_reaches(model_dir: str):
    model = load_model(model_dir, CPU)
    reached: list[LlamaDecoderLayer] = list(model.model.layers)
    strange = LlamaDecoderLayer(model.config, 0)
    model._modules = {"vision": strange, **model._modules}
    assert decoder_layers(model) == [strange, *reached]
    batch = pad(make_dummy_samples([5, 4], VOCABULARY), CPU)
    assert LayerProbe(model, batch.tokens, None).seconds(bfloat16=False) > 0
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(NotImplementedError, match="none of the model's layers"):
        LayerProbe(model, batch.tokens, None)


def test_device_clock_waits_for_an_accelerator(monkeypatch: pytest.MonkeyPatch):
    waits: list[None] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(None))
    assert layer_probe.device_clock(torch.device("cuda")) == pytest.approx(
        time.perf_counter(), abs=10
    )
    assert len(waits) == 1
    assert layer_probe.device_clock(CPU) == pytest.approx(time.thread_time(), abs=10)
    assert len(waits) == 1


def test_model_with_a_sliding_window_stays_padded_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention_choice, "choices", {})
    folder = save_mistral(tmp_path)
    with capture_logs() as logs:
        assert attention_of(folder) == ("sdpa", False)
    (entry,) = logs
    assert entry["log_level"] == "warning"
    assert "a part of the earlier tokens" in entry["refused"]["packed"]
    with pytest.raises(ConfigError, match="does not fit mistral"):
        attention_of(folder, attention="packed")


@contextmanager
def uncut_rows() -> Iterator[None]:
    """Let packed attention ignore where sequences begin."""
    own = ALL_ATTENTION_FUNCTIONS[PACKED]

    def uncut(*arguments: Any, cu_seq_lens_q: Any = None, **options: Any) -> Any:
        return own(*arguments, **options)

    AttentionInterface.register(PACKED, uncut)
    try:
        yield
    finally:
        AttentionInterface.register(PACKED, own)


def with_outliers(folder: str) -> PreTrainedModel:
    """Return a model in bfloat16 with a few numbers of its states far larger than all others.

    Trained models have such numbers.
    """
    model = load_model(folder, CPU)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 3] *= 300
        model.base_model.norm.weight[::7] *= 100
    return model.bfloat16()


def test_packing_fits_trained_weights_in_bfloat16(fresh_dir: str):
    model = with_outliers(fresh_dir)
    assert packing_misfit(model, "packed", bfloat16=True) is None


def test_rows_that_are_not_cut_are_refused_in_bfloat16(fresh_dir: str):
    model = load_model(fresh_dir, CPU).bfloat16()
    with uncut_rows():
        misfit = packing_misfit(model, "packed", bfloat16=True)
    assert misfit is not None
    assert "states are" in misfit
