"""No output of a command shows the secrets that a spec or a session could hold."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from cli.main import app
from cli.session_commands import without_secrets
from tlt.spec.config import RayCluster, SessionSpec

SECRET = "e7c1f9"


def shown(spec: dict[str, Any], folder: Path, *changes: str) -> tuple[int, str]:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(spec))
    options = [part for change in changes for part in ("--set", change)]
    result = CliRunner().invoke(app, ["config", "show", str(file), *options])
    return result.exit_code, result.output + str(result.exception or "")


def test_config_show_names_the_variable_of_a_token(
    raw_spec: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    judged = {"kind": "url", "url": "http://judge:8000/score", "token_variable": "JUDGE_TOKEN"}
    code, output = shown(raw_spec | {"reward": judged}, tmp_path)
    assert code == 0
    assert "token_variable: JUDGE_TOKEN" in output
    assert SECRET not in output


@pytest.mark.parametrize("url", [f"http://user:{SECRET}@judge/score", f"https://{SECRET}@judge?x"])
def test_a_judges_url_holds_no_password(raw_spec: dict[str, Any], tmp_path: Path, url: str) -> None:
    judged = raw_spec | {"reward": {"kind": "url", "url": url}}
    for code, output in (
        shown(judged, tmp_path),
        shown(
            raw_spec | {"reward": {"kind": "url", "url": "http://judge"}},
            tmp_path,
            f"reward.url={url}",
        ),
    ):
        assert code != 0
        assert "url must hold no user and no password" in output
        assert SECRET not in output


def test_a_judges_url_may_hold_an_at_sign_in_its_path(
    raw_spec: dict[str, Any], tmp_path: Path
) -> None:
    judged = {"kind": "url", "url": "http://judge/models/a@b?user=c@d"}
    code, output = shown(raw_spec | {"reward": judged}, tmp_path)
    assert code == 0, output


def test_status_leaves_the_secrets_of_a_session_out() -> None:
    cluster = RayCluster(
        address="host:6379",
        hosts=2,
        workers_per_host=1,
        cpus_per_worker=1,
        runtime_env=f'{{"env_vars": {{"WANDB_API_KEY": "{SECRET}"}}}}',
    )
    spec = SessionSpec(
        name="one",
        folder="/f",
        runs="/runs",
        flight="/f",
        redis_url=f"rediss://:{SECRET}@redis:6379/0",
        cluster=cluster,
    )
    assert SECRET in str(msgspec.to_builtins(spec))
    assert SECRET not in str(msgspec.to_builtins(without_secrets(spec)))
