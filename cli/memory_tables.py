"""Tables of a memory plan: what a device and a host hold, and what to change if it is too much."""

from collections.abc import Sequence

from cli.output import complain, print_table, say
from tlt.memory_plan import HostItem, Item, JobMemory, MemoryPlan

# smaller items are shown, too: their sum isn't small
_SMALLEST = 5e6


def print_assumptions(job: JobMemory, plan: MemoryPlan, precision_assumed: bool) -> None:
    devices, spread = plan.devices, plan.spread
    engines = spread.ranks // spread.tensor_parallel
    precision = "bfloat16" if job.bfloat16 else "float32"
    assumed = "; assumed, because algorithm.precision is auto" if precision_assumed else ""
    say(f"policy   {job.policy.weights / 1e9:.3f} billion weights")
    say(
        f"devices  {devices.name}, {devices.memory / 1e9:.1f} GB each, "
        f"of which {plan.budget / 1e9:.1f} GB may be filled"
    )
    say(f"engines  {engines} of {_count(spread.tensor_parallel, 'device')}")
    say(f"learner  {_sharding(spread.shards)}")
    state = _gigabytes(plan.learner_state)
    trained = f"16 B of {job.trained / 1e6:.4g} million trained weights, and 4 B of the others"
    share = "16 B a weight" if job.can_be_sharded else trained
    say(f"         {state} GB of parameters, gradients and moments on each device, {share}")
    say(f"update   in {precision}{assumed}")


def print_sizes(why: str, context: int, *, known: bool) -> None:
    """Say what a job chooses where its spec leaves sizes open, and the context that it counts."""
    say(f"sizes    {why}")
    if known:
        say(f"         {context} tokens of context: the longest prompt and answer")
    else:
        say(f"         {context} tokens of context: the prompts can't be read here")
        say("         a job counts its longest prompt and answer")


def print_items(plan: MemoryPlan, host: Sequence[HostItem]) -> None:
    rows = [_row(item) for item in plan.items if item.bytes]
    rows.append(("most at once", _gigabytes(plan.total), plan.peak, "what stays, and this phase"))
    print_table(("on each device", "GB", "during", "note"), rows)
    print_table(
        ("on each host", "GB", "where", "note"),
        [
            (each.name, _gigabytes(each.bytes), "/dev/shm" if each.shared else "RAM", each.note)
            for each in host
        ],
    )


def print_verdict(name: str, plan: MemoryPlan) -> None:
    total, budget = _gigabytes(plan.total), _gigabytes(plan.budget)
    if plan.fits:
        say(f"{name} fits: {total} GB of {budget} GB on each device")
        return
    largest = plan.largest
    complain(
        f"{name} does not fit {plan.devices.name}: {total} GB on each device, "
        f"{_gigabytes(plan.total - plan.budget)} GB too much; "
        f"the most takes '{largest.name}' ({_gigabytes(largest.bytes)} GB)"
    )
    print_table(
        ("what helps", "GB on each device", "then"),
        [
            (remedy.change, _gigabytes(remedy.bytes), "fits" if remedy.fits else "still too much")
            for remedy in plan.remedies
        ],
    )


def _row(item: Item) -> tuple[str, str, str, str]:
    return item.name, _gigabytes(item.bytes), item.during, item.note


def _sharding(shards: int) -> str:
    return f"sharded over {shards} devices (FSDP2)" if shards > 1 else "not sharded"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}" if size >= _SMALLEST else f"{size / 1e9:.4f}"
