"""A compiled training step as a file, so that a job starts without compiling.

The file holds what the step was compiled from, for the constants of another config show in no argument's shape.
"""

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh

from slicewise.catalog import chips
from slicewise.config import SECTION_OF, RunConfig, flat, resolve_degrees
from slicewise.errors import UserError
from slicewise.interop.huggingface import load_spec
from slicewise.parallel import cluster
from slicewise.train import choices, identity

MARK = b"slicewise executable\n"  # then a SHA-256 of the rest, a pickle
DIGEST_BYTES = hashlib.sha256().digest_size
AGAIN = "make it again with slicewise compile --serialize"
# Keys that enter the step as they are; what else does is resolved first.
KEYS = {
    key
    for key, section in SECTION_OF.items()
    if section in ("model", "optimizer", "lora") or key in ("steps", "sequence_length", "global_batch_size")
}
KEYS |= {"context_strategy", "pipeline_microbatches", "pipeline_repeats", "pipeline_gather"}
KEYS -= {"model", "use_qwix_quantization", "quantization", "attention", "warmup_steps"}


def dumps(compiled: jax.stages.Compiled, config: RunConfig, mesh: Mesh) -> bytes:
    """``compiled``, the update of ``config`` on ``mesh``, with all that it belongs to."""
    kept = _belongs_to(config, mesh) | {"executable": serialize(compiled)}
    content = pickle.dumps(kept)
    return MARK + hashlib.sha256(content).digest() + content


def load(path: str, config: RunConfig, mesh: Mesh) -> Any:
    """The update of ``config`` on ``mesh`` from the file of an executable.

    The file is a pickle: load none that you did not make. Raises UserError for one that cannot be read, is damaged, or
    belongs to other devices, versions, sources or another config.
    """
    kept = _read(path)
    _check(path, kept, _belongs_to(config, mesh))
    payload, in_tree, out_tree = kept["executable"]
    devices = list(mesh.devices.flat)
    try:
        return deserialize_and_load(
            payload, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )
    except (jax.errors.JaxRuntimeError, ValueError) as e:
        reason = str(e).splitlines()[0]
        raise UserError(f"executable {path} does not load on {len(devices)} devices here: {reason}") from e


def _read(path: str) -> dict[str, Any]:
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise UserError(f"executable {path}: {e.strerror}.") from e
    if not data.startswith(MARK[: len(data)]):
        raise UserError(f"executable {path} is none of this version's slicewise compile --serialize.")
    start = len(MARK) + DIGEST_BYTES
    if data[len(MARK) : start] != hashlib.sha256(data[start:]).digest():
        raise UserError(
            f"executable {path} is cut short or damaged: its {len(data):,} bytes are not what slicewise compile"
            " --serialize wrote; copy it again, or make it again."
        )
    return pickle.loads(data[start:])


def _belongs_to(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    return {
        "place": _place(mesh),
        "versions": {n: v for n, v in identity.versions().items() if is_tpu or n != "libtpu"},
        "sources": identity.source_digest(),
        "settings": _settings(config, mesh),
    }


def _check(path: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises UserError for the first thing that differs."""
    if theirs["place"] != ours["place"]:
        raise UserError(
            f"executable {path} was compiled for {theirs['place']}; here is {ours['place']}. Leave the key executable"
            " out, or make one for these devices with slicewise compile --serialize."
        )
    if name := _first_difference(theirs["versions"], ours["versions"]):
        was, here = (x["versions"].get(name, "none") for x in (theirs, ours))
        raise UserError(
            f"executable {path} was made with {name} {was}, and {here} is installed; {AGAIN}, or install {was}."
        )
    if theirs["sources"] != ours["sources"]:
        raise UserError(f"executable {path} was made by other sources of slicewise than these; {AGAIN}.")
    if key := _first_difference(theirs["settings"], ours["settings"]):
        was, here = (x["settings"].get(key, "not set") for x in (theirs, ours))
        raise UserError(
            f"executable {path} was compiled with {key} = {was}, and this run has {here}; {AGAIN}, or set it back."
        )


def _first_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    different = (k for k in [*theirs, *ours] if k not in theirs or k not in ours or theirs[k] != ours[k])
    return next(different, None)


def _settings(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    """What the update of ``config`` on ``mesh`` is compiled from: every value that enters it, resolved."""
    spec, values = load_spec(config.model.model), flat(config)
    model = {f"the model's {k}": v for k, v in spec.model_dump(exclude={"name", "source"}).items()}
    skips = config.faults.on_bad_step == "skip"
    found = {
        "quantization": config.quantization,
        "attention": choices.kernels(config, spec, mesh)["kernel"].name,
        "warmup_steps": config.warmup_steps,
        "on_bad_step": "skip" if skips else "stop or rollback",  # which are decided outside the step
    }
    idle = "quantization_" if config.quantization == "none" else "-"
    found |= {k: v for k, v in values.items() if k in KEYS and not k.startswith(idle)}
    flags = {f"the compiler's {k}": v for k, v in choices.compiler_options(config, mesh).items()}
    return model | found | _degrees(config, mesh) | flags


def _degrees(config: RunConfig, mesh: Mesh) -> dict[str, int]:
    """The keys of parallelism, without -1."""
    slices = _slices(mesh)
    found = resolve_degrees(config, num_slices=slices, devices_per_slice=mesh.devices.size // slices)
    return {
        f"{network}_{axis}_parallelism": ways
        for network, degrees in (("ici", found.ici), ("dcn", found.dcn))
        for axis, ways in degrees.items()
    }


def _slices(mesh: Mesh) -> int:
    if mesh.devices.flat[0].platform == "cpu":
        return cluster.emulated_slices() or 1
    return len({getattr(d, "slice_index", None) or 0 for d in mesh.devices.flat})


def _place(mesh: Mesh) -> str:
    """The devices of ``mesh`` as a person calls them: "2 x v5p 4x4x8", "8 x cpu"."""
    devices = list(mesh.devices.flat)
    kind = devices[0].device_kind
    chip = chips.of_device_kind(kind)
    if devices[0].platform != "tpu" or chip is None:
        return f"{len(devices)} x {kind}"
    dims = list(zip(*(d.coords for d in devices), strict=True))[: chip.ici_dims]
    topology = "x".join(str(1 + max(dim) - min(dim)) for dim in dims)
    return f"{f'{slices} x ' if (slices := _slices(mesh)) > 1 else ''}{chip.name} {topology}"
