"""Which queued resources are dead and still count against the quota."""

from typing import Any

from slicewise.launch.queued_resources.request import OWNER_LABEL

DEAD = ("FAILED", "SUSPENDED")


def dead(found: list[Any], owner: str | None) -> list[Any]:
    """Those of ``found`` that FAILED or are SUSPENDED and carry the label of ``owner``; None means any owner,
    but never one without the label: that is not ours to delete."""
    return [
        qr
        for qr in found
        if qr.state.state.name in DEAD and (mine := owner_of(qr)) is not None and owner in (None, mine)
    ]


def owner_of(qr: Any) -> str | None:
    """Who made it with slicewise; None for others."""
    owners = {spec.node.labels.get(OWNER_LABEL) for spec in qr.tpu.node_spec}
    return owners.pop() if len(owners) == 1 else None
