"""A queued resource in plain terms: what it is, in which state, and what to know of its slices."""

import time
from dataclasses import dataclass
from typing import Any

from slicewise.launch.queued_resources.collect import owner_of


@dataclass(frozen=True)
class Summary:
    """``slices`` is how many were asked for; ``reason`` what the API says of a failure."""

    name: str
    state: str
    accelerator_type: str
    slices: int
    tier: str
    owner: str
    age_s: float
    reason: str


def summary(qr: Any) -> Summary:
    """Of google.cloud.tpu_v2alpha1.QueuedResource."""
    specs = qr.tpu.node_spec
    node = specs[0].node if specs else None
    kind = node.accelerator_type or node.accelerator_config.topology if node else ""
    return Summary(
        qr.name.rsplit("/", 1)[1],
        qr.state.state.name,
        kind,
        len(specs),
        tier(qr),
        owner_of(qr) or "",
        max(0.0, time.time() - qr.create_time.timestamp()),
        qr.state.failed_data.error.message,
    )


def tier(qr: Any) -> str:
    if "spot" in qr:
        return "spot"
    if "best_effort" in qr:
        return "best-effort"
    return "reserved" if "guaranteed" in qr or qr.reservation_name else "on-demand"


def details(qr: Any, nodes: list[Any]) -> list[str]:
    """Lines for a person, the first a heading."""
    said = summary(qr)
    lines = [
        f"{said.name}: {said.state}",
        f"  {said.slices} x {said.accelerator_type}, {said.tier}"
        + (f", owner {said.owner}" if said.owner else ""),
        f"  runtime {qr.tpu.node_spec[0].node.runtime_version}, created {qr.create_time:%Y-%m-%d %H:%M:%S} UTC",
    ]
    if said.reason:
        lines.append(f"  reason: {said.reason}")
    for node in nodes:
        hosts = [e.access_config.external_ip or e.ip_address for e in node.network_endpoints]
        about = [node.state.name]
        if node.health.name not in ("HEALTH_UNSPECIFIED", "HEALTHY"):
            about.append(node.health.name)
        if node.upcoming_maintenance.window_start_time:
            about.append(f"maintenance from {node.upcoming_maintenance.window_start_time}")
        where = f": {', '.join(dict.fromkeys(hosts))}" if hosts else ""
        lines.append(f"  {node.name.rsplit('/', 1)[1]} {', '.join(about)}{where}")
    return lines


def as_json(message: Any) -> dict[str, Any]:
    """The API's own JSON."""
    from google.protobuf import json_format

    return json_format.MessageToDict(type(message).pb(message))
