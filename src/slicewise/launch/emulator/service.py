"""One emulated cloud in one event loop: the state machine, its clock, its VMs, and who may call it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh

from slicewise.launch.emulator.api import VERSIONS, Api, check_parent
from slicewise.launch.emulator.fleet import Fleet
from slicewise.launch.emulator.machine import Machine
from slicewise.launch.emulator.metadata_server import MetadataServer
from slicewise.launch.emulator.networks import Network
from slicewise.launch.emulator.records import NEVER, Code, Endpoint, LossKind, Refused, Settings


@dataclass
class ApiFault:
    """The next ``times`` calls get this answer."""

    code: Code
    times: int
    retry_s: float | None = None


class Service:
    """``call`` is how every request comes in, from any transport."""

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        identity: str,
        host_key: asyncssh.SSHKey,
        user_key: asyncssh.SSHKey,
        network: Network,
    ):
        self.machine = Machine(settings, now_s=time.time())
        public = host_key.export_public_key().decode().strip()
        self.apis = {version: Api(version, self.machine, public) for version in VERSIONS}
        self.metadata = MetadataServer(self._metadata_of)
        self.fleet = Fleet(
            directory,
            identity,
            host_key,
            self._may_log_in,
            self._up,
            self._broken,
            self.metadata,
            network,
        )
        self.fault: ApiFault | None = None
        self._user_key = _key(user_key.export_public_key().decode())
        self._timer: asyncio.TimerHandle | None = None

    def call(self, version: str, method: str, request: Any) -> Any:
        """The answer of one API method. Raises Refused."""
        if self.fault:
            fault = self.fault
            fault.times -= 1
            if fault.times <= 0:
                self.fault = None
            raise Refused(fault.code, f"injected: {fault.code.name}", retry_s=fault.retry_s)
        function = self.apis[version].methods.get(method)
        if function is None:
            raise Refused(Code.UNIMPLEMENTED, f"The emulator has no method {method}.")
        return self.change(lambda: function(request))

    def operation(self, name: str) -> Any:
        """A long-running operation, in the terms of the version that asked for it. Raises Refused."""
        self.change(lambda: None)
        operation = self.machine.find_operation(name)
        return self.apis[operation.version].operation(operation)

    def operations(self, parent: str) -> list[Any]:
        check_parent(parent)
        found = [o for o in self.machine.operations.values() if o.name.startswith(f"{parent}/operations/")]
        return [self.apis[o.version].operation(o) for o in found]

    def change(self, act: Callable[[], Any]) -> Any:
        """``act`` on the machine at the present time, and all that follows from it for VMs and timers."""
        self.machine.advance(time.time())
        try:
            return act()
        finally:
            self._settle()

    def _up(self, name: str, boot: int, endpoints: list[Endpoint]) -> None:
        self.change(lambda: self.machine.up(name, boot, endpoints))

    def _broken(self, name: str, boot: int, message: str) -> None:
        self.change(lambda: self.machine.broken(name, boot, message))

    def _settle(self) -> None:
        machine = self.machine
        noticed, dirty = list(machine.noticed), list(machine.dirty)
        machine.noticed.clear()
        machine.dirty.clear()
        self.fleet.notify(noticed)
        self.fleet.follow(dirty, machine.nodes)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        due_s = machine.due_s()
        if due_s != NEVER:
            delay_s = max(0.0, due_s - time.time()) + 0.001  # not before it: clocks have grains
            self._timer = asyncio.get_running_loop().call_later(min(delay_s, 3600), self.change, lambda: None)

    async def close(self) -> None:
        if self._timer:
            self._timer.cancel()
        await self.fleet.close()

    def _may_log_in(self, name: str, key: str) -> bool:
        """The emulator's own key, or one of the node's metadata as gcloud writes it: USER:KEY."""
        node = self.machine.nodes.get(name)
        lines = node.metadata.get("ssh-keys", "").splitlines() if node else []
        return _key(key) in {self._user_key, *(_key(line.partition(":")[2]) for line in lines)}

    def _metadata_of(self, name: str, index: int) -> dict[str, Any]:
        """The metadata tree of one worker."""
        node = self.machine.nodes.get(name)
        if node is None:
            return {}
        qr = self.machine.queue[node.queued_resource]
        project, zone = qr.parent.split("/")[1::2]
        losing = node.loss.kind if node.loss else None
        endpoints = ",".join(f"unknown:unknown:{endpoint.host}" for endpoint in node.endpoints)
        tpu_env = {
            "ACCELERATOR_TYPE": node.spec.body["acceleratorType"],
            "CONSUMER_PROJECT_ID": project,
            "NODE_ID": node.spec.node_id,
            "TOPOLOGY": node.spec.topology,
            "WORKER_ID": str(index),
            "ZONE": zone,
        }
        if len(qr.nodes) > 1:
            first = qr.nodes[0].endpoints
            tpu_env |= {
                "MEGASCALE_COORDINATOR_ADDRESS": first[0].host if first else "",
                "MEGASCALE_NUM_SLICES": str(len(qr.nodes)),
                "MEGASCALE_SLICE_ID": str(qr.nodes.index(node)),
            }
        maintained = losing == LossKind.MAINTENANCE
        return {
            "project": {"project-id": project},
            "instance": {
                "id": str(node.number * 1000 + index),
                "hostname": f"{node.spec.node_id}-w-{index}",
                "name": f"{node.spec.node_id}-w-{index}",
                "zone": f"projects/{project}/zones/{zone}",
                "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE" if maintained else "NONE",
                "preempted": "TRUE" if losing == LossKind.PREEMPTION else "FALSE",
                "attributes": {
                    **node.metadata,
                    "accelerator-type": node.spec.body["acceleratorType"],
                    "agent-worker-number": str(index),
                    "instance-id": node.spec.node_id,
                    "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in tpu_env.items()),
                    "worker-network-endpoints": endpoints,
                },
            },
        }


def _key(line: str) -> tuple[str, ...]:
    """Type and body of a public key, without its comment."""
    return tuple(line.split()[:2])
