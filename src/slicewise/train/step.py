"""The training step, built from (config, mesh) alone: the same builder serves devices that are not there."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slicewise.catalog.model import ModelSpec
from slicewise.config import RunConfig
from slicewise.costs.adapters import Lora
from slicewise.costs.batch import check_positions, check_tokens
from slicewise.interop.huggingface import load_spec
from slicewise.model import transformer
from slicewise.model.lora import adapted, adapters, freeze
from slicewise.model.moe import balanced
from slicewise.model.params import mapped
from slicewise.model.quantization import ranges_of
from slicewise.parallel import context, rules
from slicewise.parallel.expert import Dispatch
from slicewise.train import accumulate, anomalies, choices
from slicewise.train.accumulate import accumulated
from slicewise.train.moments import on_host
from slicewise.train.objective import Counts, Terms, Weights, counts, objective
from slicewise.train.optimizer import keeping, optimizer, schedule

_LEVEL = "xla_backend_optimization_level"
BATCH_KEYS = ("tokens", "targets", "segment_ids", "positions")  # each int32 [B, T]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    step: Any  # int32 scalar: optimiser steps taken
    params: Any  # what is trained: transformer.Params, with LoRA the adapters by the name of their matrix
    opt_state: Any
    # The largest activation and weight of each matrix's last calibration, by name; None without
    ranges: Any = None
    frozen: Any = None  # with LoRA, the Params below the adapters


@dataclass(frozen=True)
class TrainStep:
    """Compiled functions of one (config, mesh) and the abstract values they take."""

    spec: ModelSpec
    mesh: Mesh
    order: (
        np.ndarray | None
    )  # which token of a row stands at each place of a batch [T]; None = each in its own
    abstract_state: TrainState  # leaves are ShapeDtypeStruct with sharding
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    init: jax.stages.Wrapped  # () -> state without what is frozen; under jax.set_mesh(mesh), as the others
    begin: jax.stages.Wrapped  # (params) -> state of a run that starts from them; donates them
    update: jax.stages.Wrapped  # (state, batch) -> (state, metrics); donates the state
    evaluate: jax.stages.Wrapped  # (params, batch) -> (summed nats, counted tokens)
    compiler_options: dict[str, Any]  # of update and evaluate: the resolved compiler flags
    # (params, batch) -> how many attention logits exceed use_max_logits_estimate, where there is one
    logits_above: jax.stages.Wrapped | None
    # (state, batch) -> the largest values of this batch that go into 8-bit products; where scales are calibrated
    calibrate: jax.stages.Wrapped | None
    layout: transformer.Params  # the Weights of the whole model
    lora: Lora | None

    def weights(self, state: TrainState) -> transformer.Params:
        """What a forward pass takes: the trained parameters, or the frozen ones with their adapters."""
        return _whole(state.params, state.frozen, self.lora)


def build_train_step(config: RunConfig, mesh: Mesh) -> TrainStep:
    """Raises UserError when the model, batch and mesh do not fit each other; compiles nothing."""
    spec = load_spec(config.model.model)
    rules.check(spec, config.data.global_batch_size, dict(mesh.shape))
    strategy, tokens = config.parallelism.context_strategy, config.data.sequence_length
    check_tokens(config.data.global_batch_size, tokens)
    context.check(spec, tokens, strategy, config.model.moe_dispatch, dict(mesh.shape))
    check_positions(spec.name, tokens, spec.learned_positions)
    dtype = jnp.dtype(config.model.compute_dtype)
    options = choices.compiler_options(config, mesh)
    remat = config.remat
    layout, steps = transformer.weights(spec), config.optimizer.gradient_accumulation_steps
    lora = choices.adapters(config, spec)
    trained = layout if lora is None else adapters(layout, lora)
    accumulate.check(config.data.global_batch_size, steps, dict(mesh.shape))
    keeping(config).check(trained, dict(mesh.shape))
    tx, learning_rate = optimizer(config, trained), schedule(config)

    def begin(params: Any) -> TrainState:
        ranges = ranges_of(layout, eight_bit) if eight_bit and eight_bit.calibrated else None
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), ranges)

    def init() -> TrainState:
        return begin(transformer.start(trained, jax.random.key(config.run.seed)))

    model = config.model
    how = {
        "dtype": dtype,
        "remat": remat,
        "layers_per_round": model.layers_per_round,
        "dispatch": Dispatch(model.moe_dispatch, model.capacity_factor),
        **choices.kernels(config, spec, mesh),
    }
    eight_bit = how["quantization"]
    weights = Weights(model.z_loss_weight, model.prediction_loss_weight, model.load_balance_loss_weight)

    def update(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        whole = counts(batch)

        def part_of_mean(params: Any, part: dict) -> tuple[jax.Array, Terms]:
            model = _whole(params, state.frozen, lora)
            return objective(
                model, spec, part, whole, weights, ranges=state.ranges, is_frozen=lora is not None, **how
            )

        differentiate = jax.value_and_grad(part_of_mean, has_aux=True)
        (_, terms), grads = accumulated(differentiate, state.params, batch, steps)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if spec.experts and spec.experts.balancing_bias and lora is None:
            params = balanced(params, terms.share_LE)
        metrics = terms.metrics() | {
            "gradient_norm": optax.tree.norm(grads),
            "learning_rate": learning_rate(state.step),
        }
        if config.faults.on_bad_step == "skip":
            before = (state.params, state.opt_state)
            params, opt_state = anomalies.unless_bad(metrics, (params, opt_state), before)
        state = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
        return state, metrics

    def calibrate(state: TrainState, batch: dict) -> dict[str, jax.Array]:
        """The mean over microbatches of their largest values.

        One that is no number is left out where there was one before: on_bad_step may leave out this step's update.
        """
        watched = how | {"quantization": dataclasses.replace(eight_bit, calibrates=True)}
        model = _whole(state.params, state.frozen, lora)

        def probed(ranges: dict[str, jax.Array], part: dict) -> tuple[jax.Array, None]:
            here = counts(part)
            found = objective(
                model, spec, part, here, weights, ranges=ranges, is_frozen=lora is not None, **watched
            )
            return found[0], None

        seen = accumulated(jax.value_and_grad(probed, has_aux=True), state.ranges, batch, steps)[1]
        return jax.tree.map(
            lambda new, old: jnp.where(jnp.isfinite(new) | (old == 0), new / steps, old), seen, state.ranges
        )

    def evaluate(params: transformer.Params, batch: dict) -> tuple[jax.Array, jax.Array]:
        summed = objective(params, spec, batch, Counts(1, 1), Weights(), **how)[1].loss
        return summed, (batch["targets"] >= 0).sum()

    estimated = config.model.use_max_logits_estimate > 0

    def logits_above(params: transformer.Params, batch: dict) -> jax.Array:
        def probed(probe: jax.Array) -> jax.Array:
            watched = how | {"kernel": dataclasses.replace(how["kernel"], probe=probe)}
            return objective(params, spec, batch, counts(batch), weights, **watched)[0]

        return jax.grad(probed)(jnp.float32(0))

    shape = (config.data.global_batch_size, config.data.sequence_length)
    sharding = NamedSharding(mesh, rules.partition("batch", "sequence"))
    with jax.set_mesh(mesh):
        started = _with_devices(jax.eval_shape(init), mesh)
        frozen = None if lora is None else _with_devices(_frozen(spec, lora), mesh)
    started = dataclasses.replace(started, opt_state=on_host(started.opt_state, keeping(config)))
    abstract_state = dataclasses.replace(started, frozen=frozen)
    start_shardings, state_shardings = (
        jax.tree.map(lambda x: x.sharding, tree) for tree in (started, abstract_state)
    )
    on_cpu = _cpu_options(mesh)
    return TrainStep(
        spec=spec,
        mesh=mesh,
        order=context.order(tokens, mesh.shape[context.AXIS], strategy),
        abstract_state=abstract_state,
        abstract_batch={k: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for k in BATCH_KEYS},
        init=jax.jit(init, out_shardings=start_shardings, compiler_options=on_cpu),
        begin=jax.jit(begin, donate_argnums=0, out_shardings=start_shardings, compiler_options=on_cpu),
        update=jax.jit(
            update,
            donate_argnums=0,
            out_shardings=(state_shardings, None),
            compiler_options=options | on_cpu,
        ),
        evaluate=jax.jit(evaluate, compiler_options=options | on_cpu),
        compiler_options=options,
        logits_above=jax.jit(logits_above, compiler_options=options) if estimated else None,
        calibrate=jax.jit(calibrate, compiler_options=options | on_cpu) if abstract_state.ranges else None,
        layout=layout,
        lora=lora,
    )


def _whole(params: Any, frozen: Any, lora: Lora | None) -> transformer.Params:
    return params if lora is None else adapted(frozen, params, lora)


def _frozen(spec: ModelSpec, lora: Lora) -> transformer.Params:
    """The shapes of a model that is not trained, as it is kept."""

    def kept() -> transformer.Params:
        layout = transformer.leaves(transformer.weights(spec))
        whole = transformer.init(spec, jax.random.key(0))
        return mapped(lambda name, x: freeze(name, layout[name], x, lora), whole)

    return jax.eval_shape(kept)


def _cpu_options(mesh: Mesh) -> dict[str, Any]:
    """For a CPU, LLVM's level 1 unless XLA_FLAGS name a level: products are library calls and other loops are laid out
    before LLVM sees them, so that higher levels only cost time."""
    if mesh.devices.flat[0].platform != "cpu" or _LEVEL in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {_LEVEL: 1}


def _with_devices(abstract: Any, mesh: Mesh) -> Any:
    """Shardings of ``abstract`` over the devices of ``mesh`` instead of the abstract mesh that tracing knows."""

    def on_mesh(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if x.sharding else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(on_mesh, abstract)
