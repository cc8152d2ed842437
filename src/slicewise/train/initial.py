"""The weights that a run starts from: a Hugging Face folder or another run, read into the layout of this job."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from slicewise.config import RunConfig
from slicewise.errors import UserError
from slicewise.model import transformer
from slicewise.model.lora import freeze
from slicewise.model.params import Weight, mapped
from slicewise.parallel.rules import partition
from slicewise.train.step import TrainStep

Keep = Callable[[str, jax.Array], Any]  # (name, float32 weight) -> what is kept of it


def load(config: RunConfig, step: TrainStep) -> transformer.Params:
    """The weights of ``initial_weights``: float32 to train, or with LoRA as they are kept frozen.

    Every process calls it at once, under the mesh of ``step``. Raises UserError where there are none, or where their
    names or shapes are not those of the model.
    """
    path = config.checkpoint.initial_weights
    if not path:
        rank = config.lora.lora_rank
        raise UserError(
            f"lora_rank = {rank} trains adapters of a trained model: set initial_weights to its folder or run."
        )
    if "://" not in path and (Path(path).expanduser() / "config.json").exists():
        return _from_hugging_face(str(Path(path).expanduser()), step, _keeper(step))
    return _from_run(path, step, _keeper(step))


def digest(frozen: transformer.Params) -> str:
    """16 hexadecimal digits of the frozen weights, the same on every mesh."""
    from slicewise.checkpoint.digest import digests
    from slicewise.checkpoint.store import flatten  # imports take a second: only where it is used

    found = json.dumps(digests(flatten(frozen)), sort_keys=True)
    return hashlib.sha256(found.encode()).hexdigest()[:16]


def check_base(config: RunConfig, frozen: transformer.Params, metadata: Mapping[str, Any]) -> None:
    """Raises UserError where ``frozen`` is not what the adapters of a checkpoint with ``metadata`` were trained on, or
    they would be multiplied by something else."""
    asked = config.lora.lora_alpha
    if (alpha := metadata.get("lora_alpha") or asked) != asked:
        raise UserError(
            f"lora_alpha = {asked:g} is not the {alpha:g} that the adapters were trained with; set it to that, or"
            " choose another run_name."
        )
    saved, found = metadata["frozen"], digest(frozen)
    if saved != found:
        raise UserError(
            f"the weights of initial_weights = '{config.checkpoint.initial_weights}' (lora_base_dtype ="
            f" {config.lora.lora_base_dtype}) have digest {found}, and the adapters were trained on {saved};"
            " set both keys to what they were."
        )


def _keeper(step: TrainStep) -> Keep:
    lora = step.lora
    if lora is None:
        return lambda name, x: x
    layout = transformer.leaves(step.layout)
    kept = transformer.leaves(step.abstract_state.frozen)

    def keep(name: str, x: jax.Array) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, kept[name])
        return jax.jit(lambda x: freeze(name, layout[name], x, lora), out_shardings=shardings)(x)

    return keep


def _from_hugging_face(path: str, step: TrainStep, keep: Keep) -> transformer.Params:
    from slicewise.interop.weights import open_weights  # needs safetensors

    with open_weights(path) as files:
        expected = transformer.leaves(step.layout)
        _check(path, step, expected, {name: files.shape(name) for name in files.sources})

        def read(name: str, weight: Weight) -> Any:
            return keep(name, _assembled(files.pieces(name), weight, step.mesh))

        return mapped(read, step.layout)


def _check(
    path: str, step: TrainStep, expected: dict[str, Weight], found: dict[str, tuple[int, ...]]
) -> None:
    """Names and shapes of the weights in ``path`` are those of the model, whose vocabulary is padded."""
    spec, advice = step.spec, f"set model={path}, or other initial_weights."
    where = f"initial_weights = '{path}'"
    if missing := expected.keys() - found.keys():
        raise UserError(f"{where} has no {min(missing)}, which model {spec.name} needs; {advice}")
    if extra := found.keys() - expected.keys():
        raise UserError(f"{where} has {min(extra)}, for which model {spec.name} has no place; {advice}")
    for name, weight in expected.items():
        shape = tuple(
            spec.vocab if dim == "vocab" else size
            for size, dim in zip(weight.shape, weight.dims, strict=True)
        )
        if shape != found[name]:
            raise UserError(
                f"{where}: {name} has shape {list(found[name])}, and model {spec.name} needs {list(shape)}; {advice}"
            )


def _assembled(pieces: Any, weight: Weight, mesh: Mesh) -> jax.Array:
    """The float32 array of ``weight`` from its ``pieces``; no more of it than this process's shards is held.

    Rows that the pieces do not have, such as those that pad the vocabulary, are zero.
    """
    sharding = NamedSharding(mesh, partition(*weight.dims))
    shards: dict[tuple, np.ndarray] = {}
    for index in sharding.addressable_devices_indices_map(weight.shape).values():
        assert index is not None
        bounds = _bounds(index, weight.shape)
        shards[bounds] = np.zeros([stop - start for start, stop in bounds], np.float32)
    for place, piece in pieces:
        for bounds, shard in shards.items():
            lead, rest = bounds[: len(place)], bounds[len(place) :]
            if not all(start <= at < stop for at, (start, stop) in zip(place, lead, strict=True)):
                continue
            here = tuple(at - start for at, (start, _) in zip(place, lead, strict=True))
            cut = piece[tuple(slice(start, stop) for start, stop in rest)]
            shard[here][tuple(slice(0, size) for size in cut.shape)] = cut

    def shard_at(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return shards[_bounds(index, weight.shape)]

    return jax.make_array_from_callback(weight.shape, sharding, shard_at)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _from_run(path: str, step: TrainStep, keep: Keep) -> transformer.Params:
    from slicewise.checkpoint.store import CheckpointStore

    directory, number = located(path)
    store = CheckpointStore(directory, keep=1)
    try:
        number = store.latest() if number is None else number
        if number is None:
            raise UserError(
                f"initial_weights = '{path}' is neither a Hugging Face folder nor a run with a complete checkpoint."
            )
        saved = RunConfig.model_validate(store.read_metadata(number)["config"])
        if saved.adapters:
            raise UserError(
                f"initial_weights = '{path}' is a run with lora_rank = {saved.lora.lora_rank}, whose checkpoints hold"
                " adapters only; export it first, and start from what slicewise export writes."
            )

        def abstract(name: str, weight: Weight) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(step.mesh, partition(*weight.dims))
            return jax.ShapeDtypeStruct(weight.shape, np.float32, sharding=sharding)

        wanted = {"params": mapped(abstract, step.layout)}
        advice = "set model to that of the run, or other initial_weights"
        params = store.restore(number, wanted, partial=True, advice=advice).state["params"]
    finally:
        store.close()
    return mapped(keep, params)


def located(path: str) -> tuple[str, int | None]:
    """(checkpoints directory, step or None for the newest) of a run's folder or RUN/checkpoints/STEP."""
    path = path.rstrip("/")
    directory, _, name = path.rpartition("/")
    if name.isdigit() and directory.rpartition("/")[2] == "checkpoints":
        return directory, int(name)
    return (path if name == "checkpoints" else f"{path}/checkpoints"), None
