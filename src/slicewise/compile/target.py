"""Slices that are not there, as devices that programs can be compiled for."""

from typing import Any

import jax
from jax.experimental import topologies

from slicewise.catalog.slices import Cluster
from slicewise.errors import UserError

# How the compiler calls the chips; two devices of TPU7x share a chip whatever is asked for.
COMPILER_NAMES = {"v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "tpu7x"}


def compiler_name(cluster: Cluster) -> str:
    """The topology's name for the compiler, such as v5p:4x4x8. Raises UserError for a chip that it has no target of."""
    name = COMPILER_NAMES.get(cluster.chip.name)
    if name is None:
        raise UserError(
            f"no compiler here makes programs for {cluster.chip.name}; choose one of {', '.join(COMPILER_NAMES)}."
        )
    return f"{name}:{'x'.join(map(str, cluster.slice.topology))}"


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
