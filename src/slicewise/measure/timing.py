"""Seconds of one kernel, or of one training step, on the devices of this job."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slicewise.config import RunConfig
from slicewise.kernels.alone import alone
from slicewise.kernels.tuned import Key
from slicewise.parallel.cluster import SliceDevices
from slicewise.parallel.mesh import build_mesh
from slicewise.train.step import TrainStep, build_train_step

LEAST_S = 0.2  # that a measurement takes, so that the clock does not decide


def kernel_seconds(key: Key, values: Mapping[str, int], part: str = "", repeats: int = 5) -> float:
    """One call on the first device, the median of ``repeats``. Raises JaxRuntimeError where it does not compile."""
    program = alone(key, values, part)
    compiled = jax.jit(program.function).lower(*program.operands).compile()
    operands = [_filled(x) for x in program.operands]
    return _median(lambda: compiled(*operands), repeats)


def _filled(x: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize > 1:
        return jnp.ones(x.shape, x.dtype)  # segments
    numbers = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    return jnp.asarray(numbers).astype(x.dtype)


def _median(call: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(call())
    once = _seconds(call, 1)
    calls = max(1, round(LEAST_S / repeats / once))
    return statistics.median(_seconds(call, calls) for _ in range(repeats))


def _seconds(call: Callable[[], Any], calls: int) -> float:
    begin_s = time.perf_counter()
    for _ in range(calls):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - begin_s) / calls


def step_seconds(config: RunConfig, devices: SliceDevices, steps: int = 3) -> float:
    """The median of ``steps`` training steps on random tokens, after one to warm up.

    Every process of the job makes the same call. Raises UserError as build_train_step does, and JaxRuntimeError where
    the step does not fit.
    """
    mesh = build_mesh(config, devices)
    step = build_train_step(config, mesh)
    with jax.set_mesh(mesh):
        update = step.update.lower(step.abstract_state, step.abstract_batch).compile()
        state, batch = step.init(), random_batch(step)
        times = []
        for _ in range(steps + 1):
            begin_s = time.perf_counter()
            state, metrics = update(state, batch)
            jax.block_until_ready(metrics)
            times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:])


def random_batch(step: TrainStep) -> dict[str, jax.Array]:
    """Whole sequences of random tokens, the same on every process."""

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "positions":
            return np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        if name == "segment_ids":
            return np.ones(shape, np.int32)
        return np.random.default_rng(0).integers(step.spec.vocab, size=shape, dtype=np.int32)

    def made(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        whole = values(name, like.shape)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])

    return {name: made(name, like) for name, like in step.abstract_batch.items()}
