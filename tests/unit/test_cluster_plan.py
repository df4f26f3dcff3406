"""A session on a Ray cluster: which hosts it uses, and which clusters it refuses."""

from pathlib import Path

import pytest

from tlt.errors import ConfigError
from tlt.session.cluster_plan import (
    ClusterOptions,
    ClusterRequest,
    RayNode,
    ask_cluster,
    plan_workers,
)
from tlt.session.control import new_session

HEAD = RayNode(address="10.0.0.1", cpus=8, gpus=0)
BIG = RayNode(address="10.0.0.2", cpus=96, gpus=8)
SMALL = RayNode(address="10.0.0.3", cpus=64, gpus=4)


def request(*, ranks: int = 1, device: str = "cuda", workers: int | None = None) -> ClusterRequest:
    return ClusterRequest(
        address="10.0.0.1:6379",
        workers_per_host=workers,
        runtime_env="{}",
        ranks=ranks,
        device="cuda" if device == "cuda" else "cpu",
        redis_url="redis://10.0.0.1",
        folder="/session",
        probe="/runs/probe",
    )


def test_uses_the_devices_of_every_host_that_has_some() -> None:
    plan = plan_workers([HEAD, BIG, BIG], request())
    assert (plan.hosts, plan.workers_per_host, plan.cpus_per_worker) == (2, 8, 12)


def test_the_smallest_host_sets_the_number_of_workers_of_each() -> None:
    plan = plan_workers([BIG, SMALL], request(ranks=2))
    assert (plan.hosts, plan.workers_per_host, plan.cpus_per_worker) == (2, 2, 32)


def test_leaves_out_hosts_without_room_for_the_workers_asked_for() -> None:
    plan = plan_workers([BIG, SMALL], request(ranks=2, workers=4))
    assert (plan.hosts, plan.workers_per_host) == (1, 4)


def test_uses_cpus_where_ranks_compute_on_them() -> None:
    plan = plan_workers([HEAD, HEAD], request(ranks=2, device="cpu"))
    assert (plan.hosts, plan.workers_per_host, plan.cpus_per_worker) == (2, 4, 2)


def test_names_what_the_hosts_have_if_none_is_large_enough() -> None:
    with pytest.raises(ConfigError) as error:
        plan_workers([HEAD, SMALL], request(ranks=8))
    assert str(error.value) == "no host has 8 GPUs (10.0.0.1 has 0, 10.0.0.3 has 4)"


def test_refuses_a_cluster_without_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        ask_cluster(
            ClusterOptions(address="10.0.0.1:6379"),
            ranks=1,
            device="cpu",
            redis_url="redis://10.0.0.1",
            folder=tmp_path,
            runs=tmp_path,
        )


@pytest.mark.parametrize("url", [None, "unix:///tmp/redis.sock"])
def test_refuses_a_redis_that_other_hosts_do_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    monkeypatch.setenv("TLT_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="--ray needs --redis-url"):
        new_session(
            "hosts",
            cluster=ClusterOptions(address="10.0.0.1:6379"),
            workers=None,
            ranks=1,
            redis_url=url,
            runs=tmp_path / "runs",
            device="cpu",
            lease_seconds=15.0,
        )
