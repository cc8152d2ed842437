"""A compiled training step as a file, so that a job starts without compiling."""

import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from slicewise.errors import UserError
from slicewise.train.step import TrainStep

PACKAGES = ("jax", "jaxlib", "slicewise")


def dumps(compiled: jax.stages.Compiled) -> bytes:
    """``compiled`` with the versions that it belongs to."""
    return pickle.dumps({"versions": _versions(), "executable": serialize(compiled)})


def load(path: str, step: TrainStep) -> Any:
    """The update of ``step`` from the file of an executable for as many devices as the mesh has.

    The file is a pickle: load none that you did not make. Raises UserError for one that cannot be read, is of other
    versions, or is of another step.
    """
    try:
        kept = pickle.loads(Path(path).read_bytes())
        versions, (payload, in_tree, out_tree) = dict(kept["versions"]), kept["executable"]
    except OSError as e:
        raise UserError(f"executable {path}: {e.strerror}.") from e
    except Exception as e:  # what is no pickle can fail in any way
        raise UserError(f"executable {path} is none of slicewise compile --serialize.") from e
    if versions != _versions():
        was = ", ".join(f"{name} {number}" for name, number in versions.items())
        raise UserError(f"executable {path} was made with {was}; make it again with what is installed here.")
    devices = list(step.mesh.devices.flat)
    try:
        loaded = deserialize_and_load(
            payload, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )
    except (jax.errors.JaxRuntimeError, ValueError) as e:
        reason = str(e).splitlines()[0]
        raise UserError(f"executable {path} does not load on {len(devices)} devices here: {reason}") from e
    _check(path, loaded, step)
    return loaded


def _check(path: str, loaded: Any, step: TrainStep) -> None:
    """Its arguments are those of ``step``: shapes, types and layout."""

    def of(x: Any) -> tuple:
        return tuple(x.shape), str(x.dtype)

    theirs = [of(x) for x in jax.tree.leaves(loaded.in_avals)]
    ours = [of(x) for x in jax.tree.leaves((step.abstract_state, step.abstract_batch))]
    if theirs != ours:
        raise UserError(
            f"executable {path} is of another step: its arguments differ from those of this config; make it"
            " again with slicewise compile --serialize."
        )


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}
