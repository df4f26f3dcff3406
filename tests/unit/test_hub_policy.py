"""A policy is named by its id on the Hub; what can't be found is told in one line."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from huggingface_hub import constants

from examples.tiny_reasoner import task
from tests.hub_cache import COMMIT, NAME, NEXT, add_commit, use_cache
from tests.in_process_cli import run_command
from tlt.errors import ConfigError
from tlt.models.hub_cache import find_hub_policy
from tlt.spec.config import JobSpec, PolicySpec
from tlt.spec.evaluation_job import evaluation_job
from tlt.spec.spec_files import parse_job_spec, require_files, to_yaml

MODEL = Path(task.__file__).parent / "model"


def load(folder: Path, **policy: str) -> JobSpec:
    raw = {
        "policy": policy,
        "data": {"train": "/train.jsonl", "eval": "/eval.jsonl"},
        "reward": {"kind": "math"},
        "algorithm": {"steps": 1, "prompts_per_step": 1, "group_size": 2},
    }
    return parse_job_spec(raw, "job.yaml", folder)


@pytest.mark.parametrize("path", [NAME, f"hf://{NAME}"])
def test_a_name_without_a_folder_is_an_id_and_stays_as_it_is_written(
    tmp_path: Path, path: str
) -> None:
    policy = load(tmp_path, path=path, revision="v1").policy
    assert (policy.path, policy.hub_id, policy.revision) == (path, NAME, "v1")


def test_a_folder_that_is_there_wins(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    policy = load(tmp_path, path=NAME).policy
    assert (policy.path, policy.hub_id) == (str(tmp_path / NAME), None)
    assert load(tmp_path, path=f"hf://{NAME}").policy.hub_id == NAME
    with pytest.raises(ConfigError, match=f"policy.revision: {tmp_path}/{NAME} is a folder"):
        load(tmp_path, path=NAME, revision="v1")


@pytest.mark.parametrize("path", ["small", "./org/small", "../org/small", "/org/small", "a/b/c"])
def test_anything_else_is_no_such_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="no such folder; a policy of the Hub is org/name"):
        require_files(load(tmp_path, path=path), "job.yaml")


def test_checking_a_spec_says_that_a_name_is_taken_for_an_id(tmp_path: Path) -> None:
    spec, row = tmp_path / "job.yaml", {"prompt": "1+1=", "answer": "2"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    raw = load(tmp_path, path="models/typo")
    data = msgspec.structs.replace(raw.data, train="train.jsonl", eval=None)
    spec.write_text(to_yaml(msgspec.structs.replace(raw, data=data)))
    line = "policy.path: no folder models/typo beside the spec; taken for a model of the Hub"
    assert line in run_command("config", "check", str(spec)).stdout
    sure = run_command("config", "check", str(spec), "--set", "policy.path=hf://models/typo")
    assert (sure.code, line in sure.stdout) == (0, False)
    (tmp_path / "models" / "typo").mkdir(parents=True)
    there = run_command("config", "check", str(spec))
    assert (there.code, "policy.path" in there.stdout) == (0, False)


def test_an_evaluation_takes_an_id_in_place_of_a_revision_of_the_spec(tmp_path: Path) -> None:
    spec = load(tmp_path, path=NAME, revision="v1")
    other = evaluation_job(spec, "job.yaml", Path("org/other")).policy
    assert (other.path, other.revision) == ("org/other", None)
    assert evaluation_job(spec, "job.yaml", tmp_path).policy.path == str(tmp_path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_cache(monkeypatch, tmp_path / "home")
    return tmp_path / "home"


def found(revision: str | None = None, *, weights: bool = True) -> str:
    policy = find_hub_policy(PolicySpec(path=NAME, revision=revision), weights=weights)
    assert policy is not None
    assert Path(policy.folder).name == policy.commit
    return policy.commit


def refusal(revision: str | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        found(revision)
    assert str(error.value).startswith(f"policy.path: {NAME}")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_finds_a_branch_a_tag_and_a_commit_in_the_cache(home: Path) -> None:
    add_commit(home, MODEL, COMMIT, "main")
    add_commit(home, MODEL, NEXT, "v1")
    assert (found(), found("v1"), found(COMMIT)) == (COMMIT, NEXT, COMMIT)


def test_says_what_is_not_in_the_cache(home: Path) -> None:
    assert f"nor whole in the cache {home}/hub, and HF_HUB_OFFLINE is set" in refusal()
    assert f"`hf download {NAME}` fills the cache" in refusal()
    add_commit(home, MODEL, COMMIT, "main")
    assert f"{NAME} at v2 is no folder, nor whole in the cache" in refusal("v2")
    assert f"`hf download {NAME} --revision v2` fills the cache" in refusal("v2")


def test_refuses_a_commit_that_lacks_weights(home: Path) -> None:
    folder = add_commit(home, MODEL, COMMIT, "main")
    shards = {"a": "model-1.safetensors", "b": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "lacks model-1.safetensors" in refusal()
    (folder / "model.safetensors").resolve().unlink()
    assert "has no *.safetensors, the only weights that TLT reads" in refusal()
    assert found(weights=False) == COMMIT


@pytest.fixture
def answers(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """Serve what a hub answers to a client: a status and the error's code."""
    answer: dict[str, object] = {}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer["asked"] = self.path
            self.send_response(int(str(answer["status"])))
            self.send_header("X-Error-Code", str(answer["code"]))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield answer
    server.shutdown()
    server.server_close()


def test_asks_no_hub_for_a_commit_that_is_whole_in_the_cache(
    home: Path, answers: dict[str, object]
) -> None:
    folder = add_commit(home, MODEL)
    answers |= {"status": 404, "code": "RepoNotFound"}
    assert found(COMMIT) == COMMIT
    assert "asked" not in answers
    (folder / "model.safetensors").unlink()
    assert "has no *.safetensors" in refusal(COMMIT)
    assert "asked" in answers


@pytest.mark.parametrize(
    ("status", "code", "complaint"),
    [
        (403, "GatedRepo", "is gated: ask for access at http://127.0.0.1:"),
        (404, "RepoNotFound", "is neither a folder nor a model of the Hub"),
        (404, "RevisionNotFound", "has no revision 'v9' (policy.revision)"),
        (500, "Broken", "and the Hub can't be reached"),
    ],
)
def test_says_what_the_hub_refuses(
    answers: dict[str, object], status: int, code: str, complaint: str
) -> None:
    answers |= {"status": status, "code": code}
    assert complaint in refusal("v9")
