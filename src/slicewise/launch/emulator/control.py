"""The emulator's own controls: faults, capacity, answers that fail, and the end."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from slicewise.launch.emulator.records import NEVER, Code, Link, LossKind, Refused
from slicewise.launch.emulator.service import ApiFault, Service

LOSSES = {"preempt": LossKind.PREEMPTION, "fail": LossKind.FAILURE, "maintain": LossKind.MAINTENANCE}
LINKS = {"partition": Link.PARTITIONED, "freeze": Link.FROZEN, "heal": Link.OPEN}
MAX_S = 1e9


class Control:
    """``token`` must come with every call; ``stop`` ends the emulator."""

    def __init__(self, service: Service, token: str, stop: Callable[[], None]):
        self._service, self.token, self._stop = service, token, stop

    def act(self, verb: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises Refused for what cannot be."""
        actions = {
            "inject": self._inject,
            "capacity": self._capacity,
            "error": self._error,
            "stop": self._end,
            "status": self._status,
        }
        if verb not in actions:
            raise Refused(Code.NOT_FOUND, f"The emulator has no control '{verb}'.")
        return actions[verb](fields)

    def _inject(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        fault, name = str(fields.get("fault")), self._node(str(fields.get("node")))
        machine = self._service.machine
        if fault in LOSSES:
            lose = functools.partial(
                machine.lose,
                name,
                LOSSES[fault],
                after_s=_seconds(fields, "after_s", 0.0),
                hold_s=_seconds(fields, "hold_s", 0.0),
                suspend=bool(fields.get("suspend")),
            )
            self._service.change(lose)
        elif fault in LINKS:
            for_s = _seconds(fields, "for_s", NEVER)
            self._service.change(lambda: machine.cut(name, LINKS[fault], for_s))
        else:
            known = ", ".join([*LOSSES, *LINKS])
            raise Refused(Code.INVALID_ARGUMENT, f"There is no fault '{fault}'; there are {known}.")
        return {"node": name}

    def _node(self, text: str) -> str:
        """A node by its full name, or by its last part where only one is called so."""
        nodes = self._service.machine.nodes
        found = [name for name in nodes if text in (name, name.rsplit("/", 1)[1])]
        if not found:
            known = ", ".join(name.rsplit("/", 1)[1] for name in list(nodes)[:8]) or "none"
            raise Refused(Code.NOT_FOUND, f"There is no node '{text}'. Nodes: {known}.")
        if len(found) > 1:
            raise Refused(Code.INVALID_ARGUMENT, f"Several nodes are called '{text}': {', '.join(found)}.")
        return found[0]

    def _capacity(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        chips = fields.get("chips")
        if isinstance(chips, bool) or not isinstance(chips, int) or chips < 0:
            raise Refused(Code.INVALID_ARGUMENT, f"chips = {chips}: expected a whole number, 0 or more.")
        machine = self._service.machine
        self._service.change(lambda: machine.set_capacity(str(fields.get("family")), chips))
        return {"capacity": dict(machine.settings.capacity)}

    def _error(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        code = Code.__members__.get(str(fields.get("code")))
        if not code:
            known = ", ".join(c.name for c in Code if c)
            raise Refused(
                Code.INVALID_ARGUMENT, f"There is no code '{fields.get('code')}'; there are {known}."
            )
        retry_s = _seconds(fields, "retry_s", NEVER)
        self._service.fault = ApiFault(
            code, int(fields.get("times", 1)), None if retry_s == NEVER else retry_s
        )
        return {}

    def _status(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        machine = self._service.machine
        families = sorted({*machine.settings.capacity, *(n.spec.family for n in machine.nodes.values())})
        used = {
            f: sum(n.spec.chips for n in machine.nodes.values() if n.placed and n.spec.family == f)
            for f in families
        }
        return {
            "queued_resources": {name: machine.shown(qr).name for name, qr in machine.queue.items()},
            "nodes": {name: node.state.name for name, node in machine.nodes.items()},
            "links": {
                name: node.link.value for name, node in machine.nodes.items() if node.link != Link.OPEN
            },
            "capacity": dict(machine.settings.capacity),
            "used": used,
        }

    def _end(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        self._stop()
        return {}


def _seconds(fields: Mapping[str, Any], key: str, default: float) -> float:
    value = fields.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_S:
        raise Refused(Code.INVALID_ARGUMENT, f"{key} = {value}: expected seconds, 0 or more.")
    return float(value)
