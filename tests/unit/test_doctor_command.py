"""`tlt doctor` prints one table, and its exit code tells a script whether TLT, or a job, fits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli import doctor, session_commands
from cli.main import app
from tests.hub_cache import COMMIT, NAME, add_commit, use_cache
from tests.unit.test_machine_check import NO_GPU, gpus
from tlt.doctor.cuda_devices import CudaState
from tlt.doctor.findings import Finding
from tlt.errors import ConfigError

# fields of config.json of published models
QWEN = {"hidden_act": "silu", "max_position_embeddings": 32768, "num_key_value_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen2.5-32b": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "vocab_size": 152064,
    },
}
SPEC = """
name: {name}
policy: {{path: {name}, dtype: bfloat16, max_context: 8192}}
data: {{train: train.jsonl}}
reward: {{kind: boxed}}
algorithm:
  {{steps: 100, prompts_per_step: 64, group_size: 8, gradient_checkpointing: true}}
rollout: {{engine: sglang, max_new_tokens: 7168}}
"""


def write_spec(folder: Path, name: str) -> Path:
    """Write a spec, and a model folder without weights."""
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(QWEN | MODELS[name]))
    (folder / f"{name}.yaml").write_text(SPEC.format(name=name))
    return folder / f"{name}.yaml"


_PARALLEL = (
    *("--set", "rollout.engine=sglang", "--set", "rollout.tensor_parallel=8"),
    *("--set", "algorithm.shards=all"),
)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(list(map(str, arguments)))
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def machine_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_cuda_state", lambda: NO_GPU)


@pytest.mark.parametrize(
    ("name", "options", "code", "shards"),
    [
        ("qwen2.5-0.5b", ["--plan", "1x80gb"], 0, 1),
        ("qwen3-8b", ["--plan", "8x80gb", "--set", "algorithm.shards=all"], 0, 8),
        ("qwen3-8b", ["--plan", "8x80gb"], 1, 1),
        ("qwen3-8b", ["--plan", "1x80gb", "--set", "policy.lora={}"], 0, 1),
        ("qwen2.5-32b", ["--plan", "8x80gb", "--set", "algorithm.shards=all"], 1, 8),
        (
            "qwen2.5-32b",
            ["--plan", "8x80gb", *_PARALLEL],
            1,
            8,
        ),
        (
            "qwen2.5-32b",
            ["--plan", "4x8x80gb", *_PARALLEL],
            0,
            32,
        ),
    ],
)
def test_a_plan_says_whether_a_job_fits(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: list[str],
    code: int,
    shards: int,
) -> None:
    spec = str(write_spec(tmp_path, name))
    assert run("doctor", spec, *options) == code
    printed = capsys.readouterr()
    assert "algorithm.precision is auto" in printed.out
    if code:
        assert f"{name} does not fit" in printed.err
        assert "the most takes '" in printed.err
        assert "what helps" in printed.out
    else:
        assert f"{name} fits: " in printed.out
    assert run("doctor", spec, *options, "--json") == code
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] == (code == 0)
    assert found["plan"]["spread"]["shards"] == shards


def test_a_plan_says_which_sizes_a_job_chooses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = str(write_spec(tmp_path, "qwen2.5-0.5b"))
    assert run("doctor", spec, "--plan", "4x80gb") == 0
    printed = capsys.readouterr().out
    assert "128 answers at once (its share of a rollout batch), 16384 tokens a pass" in printed
    assert run("doctor", spec, "--plan", "4x20gb") == 0
    assert "answers at once (what 18.4 GB hold)" in capsys.readouterr().out
    fixed = ["--set", "rollout.slots=4", "--set", "algorithm.microbatch_tokens=512"]
    assert run("doctor", spec, "--plan", "4x80gb", *fixed) == 0
    assert "4 answers at once, 512 tokens a pass" in capsys.readouterr().out
    fixed += ["--set", "rollout.cache_tokens=40000"]
    assert run("doctor", spec, "--plan", "4x80gb", *fixed) == 0
    assert "answers at once" not in capsys.readouterr().out


def test_a_plan_counts_the_longest_prompt_and_answer_as_a_job_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = str(write_spec(tmp_path, "qwen2.5-0.5b"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path("examples/tiny_reasoner/model") / name, tmp_path / "qwen2.5-0.5b")
    changes = ["policy.max_context=null", "rollout.max_new_tokens=200", "rollout.engine=native"]
    changes.append("data.chat_template=false")
    options = ["--plan", "1x16gb", *(o for change in changes for o in ("--set", change))]
    assert run("doctor", spec, *options) == 1
    printed = capsys.readouterr()
    assert "32768 tokens of context: the prompts can't be read here" in printed.out
    assert "does not fit" in printed.err
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "12+23+34=", "answer": "69"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("doctor", spec, *options) == 0
    printed = capsys.readouterr().out
    # a token to begin with, and one for each character
    assert "210 tokens of context: the longest prompt and answer" in printed
    assert "qwen2.5-0.5b fits" in printed


@pytest.mark.parametrize(
    ("stated", "shards"),
    [("algorithm.shards=all", 8), ("algorithm.shards=4", 4), ("workers.count=2", 2)],
)
def test_shards_of_the_spec_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stated: str, shards: int
) -> None:
    """A job that asks for a number of workers has their devices alone."""
    spec = str(write_spec(tmp_path, "qwen2.5-0.5b"))
    changes = ("--set", "algorithm.shards=all", "--set", stated)
    assert run("doctor", spec, "--plan", "8xh100", *changes) == 0
    assert f"sharded over {shards} devices (FSDP2)\n" in capsys.readouterr().out


def test_a_changed_key_changes_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = str(write_spec(tmp_path, "qwen3-8b"))
    caches: list[int] = []
    sharded = ("--set", "algorithm.shards=all", "--plan", "8xh100", "--json")
    for slots in (4, 8):
        run("doctor", spec, "--set", f"rollout.slots={slots}", *sharded)
        items = json.loads(capsys.readouterr().out)["plan"]["items"]
        caches += [item["bytes"] for item in items if item["name"] == "engine: KV cache"]
    assert caches[1] == 2 * caches[0]


def test_a_spec_is_planned_for_this_machine_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("doctor", "configs/tiny-reasoner.yaml") == 0
    printed = capsys.readouterr().out
    assert "x CPU core" in printed
    assert "tiny-reasoner fits" in printed


def test_small_shared_memory_is_a_warning_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert run("doctor", "configs/tiny-reasoner.yaml") == 0
    assert "warning: /dev/shm has 0.0 GB free" in capsys.readouterr().err
    assert run("doctor", "configs/tiny-reasoner.yaml", "--plan", "8xh100") == 0
    assert capsys.readouterr().err == ""


def test_says_why_a_job_does_not_speculate_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = ("configs/tiny-reasoner.yaml", "--set", "rollout.max_new_tokens=8")
    why = "no speculation: speculation guesses 12 tokens at once, and an answer has room for 8"
    assert run("doctor", *short, "--plan", "8xh100") == 0
    printed = capsys.readouterr().out
    assert why in printed
    assert "drafter" not in printed
    assert run("config", "show", *short) == 0
    shown = capsys.readouterr()
    assert why in shown.err
    assert {"mode: 'off'", "train: 'off'"} <= {line.strip() for line in shown.out.splitlines()}
    assert run("config", "show", *short, "--set", "speculation.mode=off") == 0
    assert capsys.readouterr().err == ""


def test_plans_a_policy_of_the_hub_whose_weights_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_cache(monkeypatch, tmp_path / "home")
    model = Path("examples/tiny_reasoner/model")
    folder = add_commit(tmp_path / "home", model, COMMIT, "main")
    (folder / "model.safetensors").unlink()
    change = f"policy.path={NAME}"
    assert run("doctor", "configs/tiny-reasoner.yaml", "--plan", "8xh100", "--set", change) == 0
    assert "fits" in capsys.readouterr().out


def test_a_policy_that_is_not_here_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_spec(tmp_path, "qwen3-8b")
    change = "policy.path=elsewhere"
    assert run("doctor", str(spec), "--plan", "8xh100", "--set", change) == 2
    complaint = capsys.readouterr().err
    assert f"policy.path: {tmp_path / 'elsewhere'}: no such folder" in complaint


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--plan", "8xh1000"], "no device 'h1000'"),
        (
            [
                "--plan",
                "4xh100",
                "--set",
                "rollout.engine=sglang",
                "--set",
                "rollout.tensor_parallel=8",
            ],
            "rollout.tensor_parallel: 8: hosts of 4",
        ),
        (
            [
                "--plan",
                "8xh100",
                "--set",
                "rollout.engine=sglang",
                "--set",
                "rollout.tensor_parallel=3",
            ],
            "rollout.tensor_parallel: 3",
        ),
        (["--plan", "8xh100", "--set", "algorithm.shards=3"], "algorithm.shards: 3: 8 devices"),
        (["--plan", "8xh100", "--set", "workers.count=9"], "9 workers of 1 rank need 9 devices"),
    ],
)
def test_wrong_options_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    spec = write_spec(tmp_path, "qwen3-8b")
    assert run("doctor", str(spec), *options) == 2
    assert complaint in capsys.readouterr().err
    assert run("doctor", "--plan", "8xh100") == 2
    assert "name SPEC" in capsys.readouterr().err


def test_the_machine_is_shown_as_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", "--runs", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert printed.split()[:6] == ["what", "found", "status", "what", "to", "do"]
    assert run("doctor", "--runs", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_what_stops_tlt_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = Finding(subject="redis-server", found="none", status="missing", advice="get one")
    monkeypatch.setattr(doctor, "check_machine", lambda *_: [lacking])
    assert run("doctor") == 1
    assert "TLT can't run here: redis-server" in capsys.readouterr().err


def choose(
    monkeypatch: pytest.MonkeyPatch, state: CudaState, workers: int | None, ranks: int = 1
) -> int:
    monkeypatch.setattr(session_commands, "read_cuda_state", lambda: state)
    return session_commands.choose_cuda_workers(workers, ranks, Path("runs"), None)


def test_a_session_on_gpus_has_a_worker_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, gpus(8), None) == 8
    assert choose(monkeypatch, gpus(8), None, ranks=4) == 2
    assert choose(monkeypatch, gpus(8), 3) == 3


@pytest.mark.parametrize(
    ("state", "workers", "ranks", "complaint"),
    [
        (NO_GPU, None, 1, "no GPU"),
        (gpus(2), 3, 1, "--workers 3 --ranks 1: they need 3 devices, and there are 2"),
        (gpus(2), None, 4, "--ranks 4: a worker needs a device a rank; there are 2"),
        (gpus(2, driver="450.80"), None, 1, "CUDA 13.0 needs 580 or newer"),
    ],
)
def test_a_session_that_gpus_cannot_hold_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
    state: CudaState,
    workers: int | None,
    ranks: int,
    complaint: str,
) -> None:
    with pytest.raises(ConfigError, match="--") as refused:
        choose(monkeypatch, state, workers, ranks)
    assert complaint in str(refused.value)


def test_up_checks_the_machine_on_gpus_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checked: list[int | None] = []
    started: list[int | None] = []

    def choose_workers(workers: int | None, *_: Any) -> int:
        checked.append(workers)
        return 5

    def new_session(*_: Any, workers: int | None, **__: Any) -> None:
        started.append(workers)
        raise ConfigError("not started: a test")

    monkeypatch.setattr(session_commands, "choose_cuda_workers", choose_workers)
    monkeypatch.setattr(session_commands, "new_session", new_session)
    for device in ("cpu", "cuda"):
        assert run("up", "--device", device, "--runs", str(tmp_path)) == 2
    assert checked == [None]
    assert started == [None, 5]


def test_a_reward_model_counts_on_the_device_that_it_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_spec(tmp_path, "qwen3-8b")
    folder = tmp_path / "judge"
    folder.mkdir()
    config = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "reward"}}
    (folder / "config.json").write_text(json.dumps(MODELS["qwen3-8b"] | config))
    header = json.dumps({"score.weight": {"shape": [1_000_000, 1_000]}}).encode()
    size = len(header).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(size + header)
    path.write_text(path.read_text().replace("kind: boxed", "kind: model, path: judge"))
    found: dict[str, Any] = {}
    for device in ("cuda", "cpu"):
        changes = [f"reward.device={device}", "reward.batch_tokens=1"]
        options = [option for change in changes for option in ("--set", change)]
        run("doctor", str(path), "--plan", "8xh100", *options, "--json")
        found[device] = json.loads(capsys.readouterr().out)["plan"]
    sizes = {item["name"]: item["bytes"] for item in found["cuda"]["items"]}
    states = 4 * 4096 + 3 * 12288
    assert sizes["reward model"] == 2 * (10**9 + states) + (700 << 20)
    assert "reward model" not in {item["name"] for item in found["cpu"]["items"]}
    helps = [remedy["change"] for remedy in found["cuda"]["remedies"]]
    assert any(change.startswith("reward.device") for change in helps)
