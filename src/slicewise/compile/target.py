"""Slices that are not there, as devices that programs can be compiled for."""

from typing import Any

import jax
from jax.experimental import topologies

from slicewise.catalog.slices import Cluster
from slicewise.compile.compiler import compiler_name
from slicewise.errors import UserError


def absent_devices(cluster: Cluster) -> list[Any]:
    """The devices of ``cluster``, none of which need exist.

    The wraparound is said in full: by default the compiler takes a torus for a mesh, and gathers twice as much.
    A v4 chip is one device (megacore), as on the real machines.
    """
    arguments: dict[str, Any] = {"wrap": [bool(w) for w in cluster.slice.wrap]}
    if len(arguments["wrap"]) == 2:
        arguments["wrap"].append(False)
    if cluster.num_slices > 1:
        arguments["num_slices"] = cluster.num_slices
    if cluster.chip.name == "v4":
        arguments["chip_config_name"] = "megacore"
    name = compiler_name(cluster)
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, **arguments)
    except jax.errors.JaxRuntimeError as e:
        raise UserError(f"the compiler refuses the topology {name}: {str(e).splitlines()[0]}") from e
    assert len(description.devices) == cluster.devices, (len(description.devices), cluster)
    return list(description.devices)
