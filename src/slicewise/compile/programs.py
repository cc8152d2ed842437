"""The programs of a run by name: the very functions that train, evaluate and generate call, with abstract arguments."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from slicewise.config import RunConfig
from slicewise.errors import UserError
from slicewise.model import transformer
from slicewise.parallel import context
from slicewise.parallel.rules import PIPELINE, partition
from slicewise.train.generate import build_generate_step
from slicewise.train.step import TrainStep, build_train_step


@dataclass(frozen=True)
class Program:
    """A jitted function and what it is lowered with; lower it under jax.set_mesh."""

    function: Any
    abstract_arguments: tuple[Any, ...]


def build_program(name: str, config: RunConfig, mesh: Mesh) -> Program:
    """``update`` is a training step, ``init`` makes its first state, ``evaluate`` scores a batch; ``prefill`` reads
    global_batch_size prompts of sequence_length tokens, ``decode`` adds a token to each.

    Raises UserError as build_train_step does, and for what generates over a pipeline or a context axis.
    """
    step = build_train_step(config, mesh)
    params = step.weights(step.abstract_state)
    match name:
        case "update":
            return Program(step.update, (step.abstract_state, step.abstract_batch))
        case "init":
            return Program(step.init, ())
        case "evaluate":
            return Program(step.evaluate, (params, step.abstract_batch))
    return _generation(name, config, step)


def _generation(name: str, config: RunConfig, step: TrainStep) -> Program:
    if (ways := step.mesh.shape[context.AXIS]) > 1:
        raise UserError(
            f"{name} cannot divide sequences, and the config asks for context parallelism {ways}; set it to 1."
        )
    if step.mesh.shape[PIPELINE] > 1:
        raise UserError(
            f"the program {name} does not run over a pipeline, as generate does not: every layer is on every device;"
            " set the pipeline's degrees to 1."
        )
    dtype = jnp.dtype(config.model.compute_dtype)
    functions = build_generate_step(step.spec, step.mesh, dtype)
    rows, length = config.data.global_batch_size, config.data.sequence_length
    by_row = NamedSharding(step.mesh, partition("batch"))

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=by_row)

    params = step.weights(step.abstract_state)
    if name == "prefill":
        return Program(functions.prefill, (params, integers(rows, length), integers(rows), length))
    assert name == "decode", name
    with jax.set_mesh(step.mesh):
        cache = jax.eval_shape(lambda: transformer.empty_cache(step.spec, rows, length, dtype))
    cache = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(step.mesh, x.sharding.spec)),
        cache,
    )
    return Program(functions.decode, (params, cache, integers(rows), integers(rows)))
