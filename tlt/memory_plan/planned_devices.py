"""Read what devices a plan has: `8xh100`, `8x80gb`, or `4x8xh100` for four hosts of eight."""

import re
from typing import Literal

import msgspec

from tlt.errors import ConfigError

GIB = 1 << 30
# part of a device's memory that stays free: PyTorch's allocator can't use every gap
RESERVE = 0.08
# what the driver leaves of the nominal memory, as torch.cuda reports it (B200: vendor's figure)
_KINDS = {
    "a100": 79.2,
    "a100-40": 39.4,
    "h100": 79.1,
    "h200": 139.8,
    "b200": 178.0,
    "l40s": 44.4,
    "a10": 22.0,
    "l4": 22.0,
    "4090": 23.5,
}
_PLAN = re.compile(r"^(?:(?:(\d+)x)?(\d+)x)?(?:(\d+)gb|([a-z0-9-]+))$")


class DevicePlan(msgspec.Struct, frozen=True, kw_only=True):
    hosts: int
    # devices of each host
    devices: int
    # memory of each device
    memory: int
    kind: str
    # a CPU has no context, no graphs and no collectives of its own
    type: Literal["cuda", "cpu"] = "cuda"

    @property
    def total(self) -> int:
        return self.hosts * self.devices

    @property
    def budget(self) -> int:
        """Return what a device may be filled with."""
        return int(self.memory * (1 - RESERVE))

    def share(self, workers: int, ranks: int) -> "DevicePlan":
        """Return the devices of some workers, on as few hosts as divide them evenly."""
        needed, each = workers * ranks, self.devices // ranks * ranks
        if needed > self.hosts * each:
            raise ConfigError(
                f"workers.count: {workers} workers of {ranks} rank{'s' if ranks > 1 else ''} need "
                f"{needed} devices, and {self.name} has {self.hosts * each}"
            )
        even = (devices for devices in range(each, 0, -ranks) if needed % devices == 0)
        devices = needed if needed <= each else next(even)
        return msgspec.structs.replace(self, hosts=needed // devices, devices=devices)

    @property
    def name(self) -> str:
        hosts = f"{self.hosts} hosts of " if self.hosts > 1 else ""
        return f"{hosts}{self.devices} x {self.kind}"


def parse_plan(text: str) -> DevicePlan:
    found = _PLAN.match(text.strip().lower())
    if found is None:
        raise ConfigError(f"--plan {text}: write 8xh100, 8x80gb, or 4x8xh100 for four hosts")
    hosts, devices, gigabytes, kind = found.groups()
    if gigabytes is None and kind not in _KINDS:
        raise ConfigError(
            f"--plan {text}: no device '{kind}' is known: {', '.join(_KINDS)}, or its memory: 80gb"
        )
    memory = int(gigabytes) * 10**9 if gigabytes is not None else int(_KINDS[kind] * GIB)
    plan = DevicePlan(
        hosts=int(hosts or 1),
        devices=int(devices or 1),
        memory=memory,
        kind=kind or f"{gigabytes} GB",
    )
    if plan.total < 1 or memory < 1:
        raise ConfigError(f"--plan {text}: at least one host, one device and 1gb")
    return plan
