"""The files in examples/cluster fit the schemas of what reads them, and give commands that exist.

Scripts run here with stand-ins for `tlt`, `ray`, `srun` and Redis, which note their arguments.
"""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.scripts.scripts
import typer.main
import yaml

from cli.main import app

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples" / "cluster"
SCHEMAS = Path(__file__).resolve().parent / "schemas"
PAGE = ROOT / "docs" / "cluster.md"
_COMMANDS: dict[str, Any] = {
    "tlt": typer.main.get_command(app),
    "ray": ray.scripts.scripts.cli,
}
_NOTING = r"""#!/bin/bash
printf '%s\0' "$(basename "$0")" "$@" > "$NOTES/$(basename "$0").$BASHPID"
"""
# by the program that they stand in for: what they do then; `tlt up` waits for all that it needs
_EFFECTS = {
    "tlt": """
if [ "$1" = up ]; then
    echo "$TLT_REDIS_URL" > "$NOTES/url"
    echo "$TLT_HOME" > "$NOTES/home"
    until [ -e "$NOTES/configuration" ] && [ $(ls "$NOTES" | grep -c started) = "$STARTS" ]; do
        sleep .05
    done
fi
""",
    "ray": '[ "$1" != start ] || touch "$NOTES/started.$BASHPID"',
    "srun": 'while [ "$1" != bash ]; do shift; done; exec "$@"',
    "openssl": "echo secret",
    "hostname": "echo 10.0.0.1 fe80::1",
    "redis-server": 'cat > "$NOTES/part" && mv "$NOTES/part" "$NOTES/configuration"',
    "python": "",
}


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.json").read_text())


def parse(command: list[str]) -> dict[str, Any]:
    """Return the values of a command's options, read by the program's own parser."""
    program, verb, *arguments = command
    known = _COMMANDS[program].commands
    assert verb in known, f"{program} has no {verb}"
    return known[verb].make_context(verb, arguments).params


class Stage:
    """A folder in which a script runs with stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        programs = folder / "programs"
        for made in (self.notes, programs, folder / ".venv" / "bin", folder / "shared"):
            made.mkdir(parents=True)
        for name, effect in _EFFECTS.items():
            (programs / name).write_text(_NOTING + effect)
            (programs / name).chmod(0o700)
        (folder / ".venv" / "bin" / "activate").touch()
        self.server = programs / "redis-server"
        self.environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "NOTES": str(self.notes),
            "REDIS_SERVER": str(self.server),
        }

    def run(self, script: str, *arguments: str, **variables: str) -> None:
        done = subprocess.run(
            ["bash", "-c", script, "script", *arguments],
            env={**self.environment, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr

    def calls(self, program: str, verb: str | None = None) -> list[list[str]]:
        """Return all calls of a program, with their arguments."""
        noted = [file.read_text() for file in self.notes.glob(f"{program}.*")]
        calls = [text.removesuffix("\0").split("\0") for text in noted]
        return [call for call in calls if verb is None or call[1:2] == [verb]]

    def check_session(self, device: str) -> None:
        """Check that a session is started, is given a job, and is ended."""
        (up,) = self.calls("tlt", "up")
        options = parse(up)
        assert options["ray"] == "10.0.0.1:6379"
        assert options["device"] == device
        # other users see the arguments of a command
        assert not any("secret" in word for word in up)
        assert re.fullmatch(
            r"rediss://:secret@10\.0\.0\.1:6390/0\?ssl_ca_certs=.*/redis\.crt\n",
            (self.notes / "url").read_text(),
        )
        (submit,) = self.calls("tlt", "submit")
        assert parse(submit)["wait"]
        (down,) = self.calls("tlt", "down")
        assert parse(down)["session"] == parse(submit)["session"] == options["session"]
        configuration = (self.notes / "configuration").read_text()
        lines = configuration.splitlines()
        assert {"port 0", "tls-port 6390", "bind 10.0.0.1", "requirepass secret"} <= set(lines)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def sbatch_options(script: str) -> Iterator[str]:
    for line in re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE):
        yield from (word.partition("=")[0] for word in shlex.split(line))


def test_slurms_script_uses_options_of_sbatch() -> None:
    used = list(sbatch_options((EXAMPLES / "slurm.sh").read_text()))
    assert {"--nodes", "--ntasks-per-node"} <= set(used)
    assert {option.removeprefix("--") for option in used} <= set(schema("slurm")["sbatch"])


@pytest.mark.parametrize(("gpus", "device"), [("8", "cuda"), ("", "cpu")])
def test_slurms_script_starts_ray_on_all_nodes_and_a_session(
    stage: Stage, gpus: str, device: str
) -> None:
    script = (EXAMPLES / "slurm.sh").read_text()
    stage.run(
        script,
        "job.yaml",
        STARTS="2",
        SLURM_JOB_ID="7",
        SLURM_NNODES="3",
        SLURM_CPUS_PER_TASK="64",
        SLURM_GPUS_ON_NODE=gpus,
        SLURMD_NODENAME="n1",
    )
    stage.check_session(device)
    known = {f"--{name}" for name in schema("slurm")["srun"]}
    for step in stage.calls("srun"):
        own = [word.partition("=")[0] for word in step[1 : step.index("bash")]]
        assert {word for word in own if word.startswith("-")} <= known
    head, nodes = sorted(map(parse, stage.calls("ray", "start")), key=lambda call: not call["head"])
    assert head["port"] == 6379
    assert nodes["address"] == "10.0.0.1:6379"
    assert head["num_gpus"] == nodes["num_gpus"] == int(gpus or 0)
    assert sum("--nodes=2" in step for step in stage.calls("srun")) == 1


def skypilot_task() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())


def test_skypilots_files_fit_its_schemas() -> None:
    schemas = schema("skypilot")
    task = skypilot_task()
    volume = yaml.safe_load((EXAMPLES / "skypilot-volume.yaml").read_text())
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])
    jsonschema.validate(volume, schemas["volume"])
    assert list(task["volumes"].values()) == [volume["name"]]
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[part]], check=True)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_skypilots_task_starts_ray_on_each_node_and_a_session_on_the_first(
    stage: Stage, rank: str
) -> None:
    script: str = skypilot_task()["run"]
    stage.run(
        script.replace("/shared", str(stage.folder / "shared")).replace(
            "/usr/bin/redis-server", str(stage.server)
        ),
        STARTS="1",
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
        SKYPILOT_NODE_RANK=rank,
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NUM_GPUS_PER_NODE="8",
        SKYPILOT_TASK_ID="task",
        SPEC="job.yaml",
        REDIS_PASSWORD="secret",
    )
    (start,) = map(parse, stage.calls("ray", "start"))
    assert start["num_gpus"] == 8
    if rank == "0":
        assert start["head"]
        assert start["node_ip_address"] == "10.0.0.1"
        stage.check_session("cuda")
        # the session's journal outlives the node
        home = (stage.notes / "home").read_text().strip()
        assert home == str(stage.folder / "shared" / "tlt" / "task")
    else:
        assert start["address"] == "10.0.0.1:6379"
        assert start["node_ip_address"] == "10.0.0.2"
        assert not stage.calls("tlt")


def kuberay_objects() -> dict[tuple[str, str], Any]:
    read = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in read}


def pods() -> list[dict[str, Any]]:
    objects = kuberay_objects()
    cluster = objects["RayCluster", "tlt"]["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    templates = [group["template"] for group in groups]
    return [*templates, objects["Deployment", "tlt-redis"]["spec"]["template"]]


def test_kuberays_cluster_fits_its_schema_and_asks_for_a_token() -> None:
    cluster = kuberay_objects()["RayCluster", "tlt"]
    jsonschema.validate(cluster, schema("kuberay"))
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        options = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        parse(["ray", "start", *options])


def test_kuberays_pods_mount_what_exists_at_the_same_paths() -> None:
    objects = kuberay_objects()
    pod_schema = {"$defs": schema("kuberay")["$defs"], "$ref": "#/$defs/pod"}
    for pod in pods():
        jsonschema.validate(pod, pod_schema)
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        (container,) = pod["spec"]["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim")
            assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in objects
    head, worker, _ = (pod["spec"]["containers"][0]["volumeMounts"] for pod in pods())
    assert head == worker
    (container,) = pods()[0]["spec"]["containers"]
    # the session's journal outlives the pod
    assert {"name": "TLT_HOME", "value": "/shared/tlt"} in container["env"]


def page_commands() -> list[list[str]]:
    """Return the commands of `tlt` and `ray` in the page's fences."""
    fences = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(fences).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [command for command in words if command[:1] in (["tlt"], ["ray"])]


def test_the_page_gives_commands_that_exist() -> None:
    commands = page_commands()
    assert {tuple(command[:2]) for command in commands} >= {("ray", "start"), ("tlt", "up")}
    for command in commands:
        parse(command)
        assert not any("PASSWORD@" in word for word in command)
