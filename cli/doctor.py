"""tlt doctor: check this machine, or plan the memory of a job before it runs."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from cli.arguments import Json, Runs, Set
from cli.memory_tables import print_assumptions, print_items, print_sizes, print_verdict
from cli.output import complain, print_json, print_table, say
from tlt.doctor.all_checks import check_machine
from tlt.doctor.cuda_devices import read_cuda_state
from tlt.doctor.findings import Finding
from tlt.doctor.local_devices import local_devices
from tlt.errors import ConfigError
from tlt.memory_plan import (
    DevicePlan,
    HostItem,
    MemoryPlan,
    host_items,
    make_plan,
    parse_plan,
    spread_over,
)
from tlt.models.hub_cache import find_hub_policy
from tlt.protocol.shared_values import SizingFacts
from tlt.spec.config import JobSpec
from tlt.spec.spec_files import load_job_spec


def doctor(
    spec: Annotated[
        Path | None, typer.Argument(help="A job's YAML file, to plan its memory.")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICES",
            help="Plan for 8xh100, 8x80gb or 4x8xh100 (hosts first); by default this machine.",
        ),
    ] = None,
    changes: Set = None,
    runs: Runs = Path("runs"),
    json: Json = False,
) -> None:
    """Check this machine; with a spec, compute what its job takes on each device."""
    if spec is not None:
        _plan(spec, plan, changes, json)
        return
    if plan is not None or changes:
        raise ConfigError("--plan and --set are for a job: name SPEC")
    findings = check_machine(runs, read_cuda_state())
    stopping = print_findings(findings, json)
    if stopping:
        raise typer.Exit(1)


def print_findings(findings: list[Finding], json: bool) -> list[Finding]:
    """Print a table or JSON, and return the findings that stop TLT."""
    stopping = [finding for finding in findings if finding.status == "missing"]
    if json:
        print_json({"findings": findings, "ok": not stopping})
        return stopping
    print_table(
        ("what", "found", "status", "what to do"),
        [(each.subject, each.found, each.status, each.advice) for each in findings],
    )
    if stopping:
        complain(f"TLT can't run here: {', '.join(each.subject for each in stopping)}")
    else:
        say("TLT can run here")
    return stopping


def _plan(path: Path, devices: str | None, changes: list[str] | None, json: bool) -> None:
    spec = load_job_spec(path, changes)
    where = local_devices(read_cuda_state()) if devices is None else parse_plan(devices)
    if spec.workers.asked is not None:
        where = where.share(spec.workers.asked, spec.rollout.tensor_parallel)
    shards = where.total if spec.algorithm.shards == "all" else spec.algorithm.shards
    _check_division(where, shards, spec.rollout.tensor_parallel)
    # imported here because torch is slow to import
    from tlt.preparation.default_speculation import settle_speculation
    from tlt.ranks.size_choice import choose_sizes, limit_context

    try:
        spread = spread_over(where, shards, spec.rollout.tensor_parallel)
        spec, facts = _read_facts(spec, where)
        spec, no_speculation = settle_speculation(spec)
        choice = choose_sizes(limit_context(spec, facts), facts, where, spread)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    job = choice.fitting
    planned = make_plan(job, where, shards, spec.rollout.tensor_parallel)
    host = list(host_items(job, planned.spread))
    if json:
        _print_json(spec.name, planned, host, no_speculation)
    else:
        print_assumptions(job, planned, spec.algorithm.precision == "auto")
        if no_speculation is not None:
            say(f"no speculation: {no_speculation}")
        if spec.leaves_sizes_open:
            print_sizes(choice.why, job.max_context, known=facts.longest_prompt > 0)
        print_items(planned, host)
        if devices is None:
            _warn_of_small_shared_memory(host)
        print_verdict(spec.name, planned)
    if not planned.fits:
        raise typer.Exit(1)


def _read_facts(spec: JobSpec, devices: DevicePlan) -> tuple[JobSpec, SizingFacts]:
    """Return the spec with its policy's folder, and what ranks choose open sizes by."""
    from tlt.doctor.longest_prompt import find_longest_prompt

    hub_policy = find_hub_policy(spec.policy, weights=False)
    spec = spec if hub_policy is None else hub_policy.with_folder(spec)
    facts = SizingFacts(
        ranks=devices.total,
        answers=spec.issued_answers,
        longest_prompt=find_longest_prompt(spec) if spec.leaves_sizes_open else 0,
    )
    return spec, facts


def _check_division(devices: DevicePlan, shards: int, tensor_parallel: int) -> None:
    if devices.devices % tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel: {tensor_parallel}: hosts of {devices.devices} devices can't "
            "be divided by that"
        )
    if devices.total % shards:
        raise ConfigError(
            f"algorithm.shards: {shards}: {devices.total} devices can't be divided by that"
        )


def _warn_of_small_shared_memory(host: list[HostItem]) -> None:
    folder = Path("/dev/shm")
    needed = sum(item.bytes for item in host if item.shared)
    if folder.is_dir() and (free := shutil.disk_usage(folder).free) < needed:
        complain(
            f"warning: {folder} has {free / 1e9:.1f} GB free, "
            f"and the job may take {needed / 1e9:.1f} GB of it"
        )


def _print_json(
    name: str, plan: MemoryPlan, host: list[HostItem], no_speculation: str | None
) -> None:
    print_json(
        {
            "job": name,
            "fits": plan.fits,
            "largest": plan.largest.name,
            "plan": plan,
            "host": host,
            "no_speculation": no_speculation,
        }
    )
