"""Where the arrays of a run's state lie, as JSON and as a table."""

from typing import TYPE_CHECKING, Any

from rich.console import Console

from slicewise.costs.units import count, counted
from slicewise.report import training
from slicewise.report.compiled import size
from slicewise.report.console import say
from slicewise.report.jsonable import SCHEMA, jsonable
from slicewise.report.tables import table

if TYPE_CHECKING:
    from slicewise.compile.state_layout import HeldArray, StateLayout


def document(layout: "StateLayout") -> dict[str, Any]:
    r = layout.request
    return {
        "kind": "state layout",
        "schema": SCHEMA,
        "model": r.config.model.model,
        "cluster": jsonable(r.cluster),
        "hosts": layout.hosts,
        "total_bytes": layout.total_bytes,
        "device_bytes": layout.device_bytes,
        "host_bytes": layout.host_bytes,
        "arrays": [jsonable(a) for a in layout.arrays],
    }


def show(out: Console, layout: "StateLayout") -> None:
    r = layout.request
    place = (
        f"{training.place(r.cluster)} ({counted(r.cluster.chips, 'chip')}, {counted(layout.hosts, 'host')})"
    )
    say(out, f"{r.config.model.model} on {place}: what a restore brings where", "bold")
    say(out, "")
    made = table("array", "shape", "part of a device", "copies", "in all", "a device", "a host reads")
    made.columns[0].overflow = "fold"
    for a in layout.arrays:
        made.add_row(
            a.name + (" (host memory)" if a.on_host else ""),
            f"{a.dtype}[{', '.join(map(str, a.shape))}]",
            _part(a),
            count(a.copies),
            *map(size, (a.bytes_, a.part_bytes, a.host_bytes)),
        )
    out.print(made)
    say(out, "")
    read, total = layout.host_bytes * layout.hosts, layout.total_bytes
    say(
        out,
        f"A checkpoint holds {size(total)}. A device holds {size(layout.device_bytes)} of it, a host reads"
        f" {size(layout.host_bytes)}, all hosts {size(read)}: {read / total:.3g} times the checkpoint.",
    )


def _part(array: "HeldArray") -> str:
    """Such as '32, 256 (fsdp), 4 (tensor), 128'."""
    dims = zip(array.part, array.axes, strict=True)
    return ", ".join(f"{n} ({' '.join(axes)})" if axes else str(n) for n, axes in dims) or "whole"
