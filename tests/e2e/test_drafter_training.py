"""`tlt drafter train` on a tiny random model writes a drafter, resumes, and refuses bad input."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Generator
from functools import cache
from itertools import count
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.main import app
from tests.e2e.live import Live
from tests.trainer.models import save_llama
from tlt.errors import UnsupportedModel
from tlt.models.drafter_folder import load_drafter
from tlt.offline_drafter.resumable_training_files import TrainingPlan
from tlt.offline_drafter.training import train_drafter

# one core that another program uses holds both threads up
pytestmark = pytest.mark.timeout(300)
_TINY = Path(__file__).parents[2] / "examples" / "tiny_reasoner"
LAYERS = 6


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Generator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random policy with the tiny reasoner's tokenizer."""
    folder = tmp_path_factory.mktemp("policy")
    save_llama(folder, num_hidden_layers=LAYERS, vocab_size=32, eos_token_id=1, bos_token_id=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(_TINY / "model" / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    rows = [
        {"prompt": f"{i}+{i + 1}=", "answer": f"{i}+{i + 1}:{2 * i}" * 3} for i in range(10, 22)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def arguments(policy: Path, out: Path, *more: str) -> list[str]:
    return [
        *("drafter", "train", "--policy", str(policy), "--out", str(out), "--held-out", "3"),
        *("--max-context", "48", "--slots", "8", *more),
    ]


def refusal(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        app(command)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("tlt: ")
    return line


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
@pytest.mark.parametrize("source", ["--data", "--prompts"])
def test_writes_a_drafter_and_nothing_else(
    policy: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layout: str,
    source: str,
):
    out = tmp_path / "drafter"
    more = (source, str(data), "--layout", layout, "--tokens", "2000", "--samples", "20", "--json")
    with pytest.raises(SystemExit) as ended:
        app(arguments(policy, out, *more))
    assert ended.value.code == 0
    curve = json.loads(capsys.readouterr().out)["curve"]
    assert curve[-1]["tokens"] >= 2000
    assert sorted(curve[-1]["noise"]) == ["4", "6", "8"]
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    assert list(tmp_path.iterdir()) == [out]
    assert load_drafter(out, LAYERS).config.layout == layout


def plan(policy: Path, data: Path, **changes: object) -> TrainingPlan:
    settings: dict[str, object] = {
        "policy": str(policy),
        "file": str(data),
        "answers_given": False,
        "layout": "eagle",
        "start": None,
        "tokens": 3000,
        "samples": 12,
        "held_out": 3,
        "max_context": 48,
        "slots": 4,
        "prompt_key": "prompt",
        "answer_key": "answer",
        "chat_template": False,
        "system_prompt": None,
        "seed": 0,
    }
    return msgspec.convert(settings | changes, TrainingPlan)


def stopping_at(calls: int) -> Callable[[], bool]:
    counted = count(1)
    return lambda: next(counted) == calls


@pytest.fixture(scope="module")
def steady(
    policy: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, torch.Tensor]]:
    """Return what an undisturbed training on so many cores learns."""

    @cache
    def train(cores: int) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("steady") / "drafter"
        train_drafter(plan(policy, data), folder, lambda line: None, lambda: False, cores)
        return load_file(folder / "model.safetensors")

    return train


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("calls", [5, 17])
def test_resumes_a_training_that_was_stopped(
    policy: Path,
    data: Path,
    tmp_path: Path,
    steady: Callable[[int], dict[str, torch.Tensor]],
    calls: int,
    cores: int,
):
    """The training is stopped once while it generates answers and once between updates."""
    chosen = plan(policy, data)
    lines: list[str] = []
    stopped = tmp_path / "stopped"
    assert train_drafter(chosen, stopped, lines.append, stopping_at(calls), cores) is None
    assert not stopped.exists()
    assert train_drafter(chosen, stopped, lines.append, lambda: False, cores) is not None
    expected = steady(cores)
    for name, tensor in load_file(stopped / "model.safetensors").items():
        # hidden states that were read back differ in the last digits
        torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=1e-3)


def test_two_cores_learn_the_same_as_one(data: Path, tmp_path: Path):
    """The policy is large enough for torch to divide its work."""
    folder = Path(save_llama(tmp_path / "policy", hidden_size=256, num_hidden_layers=LAYERS))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(_TINY / "model" / name, folder / name)
    chosen, found = (
        plan(folder, data, answers_given=True, samples=9),
        list[dict[str, torch.Tensor]](),
    )
    for number, cores in enumerate((1, 2, 2)):
        out = tmp_path / str(number)
        train_drafter(chosen, out, lambda line: None, lambda: False, cores)
        assert torch.get_num_threads() == cores
        found.append(load_file(out / "model.safetensors"))
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, found[0][name], rtol=1e-2, atol=1e-3)
        assert torch.equal(tensor, found[2][name])


def test_resumes_with_the_same_command_after_ctrl_c(
    policy: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "drafter"
    command = arguments(policy, out, "--data", str(data), "--tokens", "6000")
    process = Live(tmp_path).start(*command)
    assert process.stdout is not None
    while " of 6,000 tokens" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130, complaint
    assert "the same command continues" in complaint
    assert not out.exists()
    with pytest.raises(SystemExit) as ended:
        app(command)
    assert ended.value.code == 0
    cores, *lines = capsys.readouterr().out.splitlines()
    assert cores == f"cores used: {len(os.sched_getaffinity(0))}"
    first, *_ = [line for line in lines if " tokens, " in line]
    assert int(first.split()[0].replace(",", "")) > 600
    assert load_drafter(out, LAYERS).config.layout == "eagle"


def test_continues_training_an_existing_drafter(policy: Path, data: Path, tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    train_drafter(plan(policy, data), first, lambda line: None, lambda: False, 1)
    chosen = plan(policy, data, start=str(first), answers_given=True, tokens=500)
    curve = train_drafter(chosen, second, lambda line: None, lambda: False, 1)
    assert curve is not None
    assert second.is_dir()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ((), "give either --data (prompts and answers) or --prompts"),
        (("--data", "/no/data.jsonl"), "/no/data.jsonl: no such file"),
        (("--data", "DATA", "--answer-key", "text"), ":1: no key 'text'"),
        (("--data", "DATA", "--prompts", "DATA"), "give either --data"),
        (("--data", "DATA", "--held-out", "12"), "none is left to train on"),
        (("--data", "DATA", "--max-context", "5"), ":1: 7 tokens leave no room in 5"),
        (("--data", "DATA", "--start", "/no/drafter"), "/no/drafter/config.json: cannot be read"),
        (("--data", "DATA", "--policy", "/no/model"), "/no/model: there is no such model folder"),
        (("--data", "DATA", "--out", "/proc/drafter"), "/proc/.drafter-training: cannot be"),
    ],
)
def test_names_bad_input_in_one_line(
    policy: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    complaint: str,
):
    named = (str(data) if part == "DATA" else part for part in more)
    assert complaint in refusal(capsys, *arguments(policy, tmp_path / "drafter", *named))


def test_refuses_a_folder_that_exists_or_was_begun_with_other_settings(
    policy: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "there").mkdir()
    command = arguments(policy, tmp_path / "there", "--data", str(data))
    assert "there: exists already" in refusal(capsys, *command)
    out = tmp_path / "begun"
    assert train_drafter(plan(policy, data), out, lambda line: None, lambda: True, 1) is None
    command = arguments(policy, out, "--prompts", str(data), "--layout", "eagle3")
    assert "began with layout eagle, not eagle3" in refusal(capsys, *command)


def test_refuses_a_drafter_of_another_policy_by_name_and_shape(
    policy: Path, data: Path, tmp_path: Path
):
    drafter = tmp_path / "drafter"
    train_drafter(plan(policy, data, tokens=200), drafter, lambda line: None, lambda: False, 1)
    wider = Path(save_llama(tmp_path / "wider", hidden_size=40, vocab_size=32))
    chosen = plan(wider, data, start=str(drafter))
    with pytest.raises(UnsupportedModel, match="its hidden is 32, the policy's 40"):
        train_drafter(chosen, tmp_path / "out", print, lambda: False, 1)
    weights = load_file(drafter / "model.safetensors")
    weights["fc.bias"] = torch.zeros(7)
    save_file(weights, drafter / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"fc.bias is \[7\], config.json implies \[32\]"):
        load_drafter(drafter, LAYERS)
