"""Joules by step, from counters that never reset; all workers of a host read the same counter."""

from tlt.id_types import Incarnation, Step
from tlt.protocol.events import PolicyUpdateFinished
from tlt.protocol.shared_values import Joules

_NOTHING = Joules()


class EnergyByStep:
    def __init__(self) -> None:
        # the counters as each incarnation last reported them
        self._last: dict[Incarnation, Joules] = {}
        self._hosts: dict[Step, dict[str, float]] = {}
        self._devices: dict[Step, float] = {}

    def add(self, event: PolicyUpdateFinished, host: str) -> None:
        now, before = event.joules, self._last.get(event.incarnation, _NOTHING)
        if now is None:
            return
        self._last[event.incarnation] = now
        if now.host is not None:
            # a host's workers read one counter, at about the same times
            hosts = self._hosts.setdefault(event.step, {})
            hosts[host] = max(hosts.get(host, 0.0), now.host - (before.host or 0.0))
        if now.devices is not None:
            more = now.devices - (before.devices or 0.0)
            self._devices[event.step] = self._devices.get(event.step, 0.0) + more

    def of(self, step: Step) -> Joules | None:
        hosts, devices = self._hosts.get(step), self._devices.get(step)
        if hosts is None and devices is None:
            return None
        return Joules(host=None if hosts is None else sum(hosts.values()), devices=devices)

    def total(self) -> Joules | None:
        steps = [spent for step in self._hosts | self._devices if (spent := self.of(step))]
        hosts = [spent.host for spent in steps if spent.host is not None]
        devices = [spent.devices for spent in steps if spent.devices is not None]
        if not steps:
            return None
        return Joules(host=sum(hosts) if hosts else None, devices=sum(devices) if devices else None)
