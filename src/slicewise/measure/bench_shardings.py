"""Times a bare stack of matrix products (plan/stack.py) under one layout, or under every legal one.

Dims in names: B rows, D d_model, F d_ff.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slicewise.catalog import chips, slices
from slicewise.catalog.slices import Cluster
from slicewise.checkpoint import together
from slicewise.config import AXES, AxisDegrees, RunConfig, resolve_degrees, with_overrides
from slicewise.costs.remat import POLICIES
from slicewise.errors import UserError
from slicewise.model.layers import weights_in
from slicewise.model.linear import linear
from slicewise.model.remat import checkpoint_policy
from slicewise.parallel import cluster
from slicewise.parallel.cluster import SliceDevices
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.rules import partition
from slicewise.plan.stack import STACK_AXES, Measured, Stack, predict
from slicewise.report import jsonable, shardings
from slicewise.train import host_memory, runtime
from slicewise.train.faults import out_of_memory

LEARNING_RATE = 1e-4


def measure(stack: Stack, config: RunConfig, devices: SliceDevices, steps: int) -> Measured:
    """Times ``steps`` steps in the layout of ``config``. Every process of the job makes the same call.

    Where the devices run out of memory there are no times. Raises UserError when the layout fits neither the devices
    nor the stack, or no layout of the stack their memory.
    """
    degrees = resolve_degrees(
        config, num_slices=devices.num_slices, devices_per_slice=devices.devices_per_slice
    )
    stack.check(degrees)
    check_memory(stack, devices)
    mesh = build_mesh(config, devices)
    known = known_cluster(devices)
    is_priced = stack.dtype == "bfloat16" and degrees.dcn["tensor"] == 1
    plan = predict(stack, known, degrees) if known and is_priced else None
    with jax.set_mesh(mesh):
        times, lack = _times(stack, mesh, steps)
    return Measured(degrees, times, plan, lack)


def report(stack: Stack, config: RunConfig, steps: int, *, sweep_all: bool, as_json: bool) -> list[str]:
    """Joins the job, measures, and returns what its first process is to print."""
    runtime.start()
    devices = cluster.found()
    first = devices.array.flat[0]
    found = sweep(stack, devices, steps) if sweep_all else [measure(stack, config, devices, steps)]
    if all(one.lack for one in found):
        every = " in every layout" if sweep_all else ""
        raise UserError(f"{found[0].lack}{every}; lower --batch-size, --embedding-dimension or --layers.")
    peak = _peak(stack, devices)
    runtime.stop()
    if jax.process_index():
        return []
    if as_json:
        return [jsonable.text(shardings.document(stack, found, peak))]
    where = f"{devices.array.size} x {first.device_kind}"
    if devices.num_slices > 1:
        where += f" in {devices.num_slices} slices"
    title = shardings.title(stack, where, devices.array.size)
    return [
        *title,
        *(shardings.ranked(stack, found, peak) if sweep_all else shardings.run(stack, found[0], peak)),
    ]


def check_memory(stack: Stack, devices: SliceDevices) -> None:
    """Raises UserError where this machine cannot hold weights, each of them once, and activations.

    Every layout needs so much. Devices with memory of their own are judged one by one.
    """
    here = [device for device in devices.array.flat if device.process_index == jax.process_index()]
    if here[0].platform == "cpu":
        whose, count, limit = "this machine", len(here), host_memory.limit_bytes()
    else:
        whose, count, limit = "a device", 1, (here[0].memory_stats() or {}).get("bytes_limit", math.inf)
    held = stack.activation_bytes(count) + stack.parameter_bytes * count // devices.array.size
    stack.check_memory(held, whose, limit)


def _peak(stack: Stack, devices: SliceDevices) -> tuple[str, float]:
    """What a rate is compared with: the chip's peak, or on devices without one jnp.matmul alone."""
    chip = chips.of_device_kind(devices.array.flat[0].device_kind)
    if chip is not None:
        return "peak", chip.peak_flops_per_s("bf16") / chip.jax_devices
    return "plain matmul", plain_flops_per_s(stack, devices)


def sweep(stack: Stack, devices: SliceDevices, steps: int) -> list[Measured]:
    """Every legal layout over these devices, the fastest first, and last those that do not fit their memory."""
    found = []
    for overrides in layouts(stack, devices.num_slices, devices.devices_per_slice):
        found.append(measure(stack, with_overrides(RunConfig(), overrides), devices, steps))
    return sorted(found, key=lambda one: one.step_s)


def layouts(stack: Stack, num_slices: int, devices_per_slice: int) -> Iterator[list[str]]:
    """Overrides of each split of both networks over data, fsdp and tensor that divides ``stack``."""
    for dcn, ici in itertools.product(_splits(num_slices), _splits(devices_per_slice)):
        keys = {f"dcn_{axis}_parallelism": d for axis, d in zip(STACK_AXES, dcn, strict=True)}
        keys |= {f"ici_{axis}_parallelism": d for axis, d in zip(STACK_AXES, ici, strict=True)}
        whole = dict.fromkeys(AXES, 1)
        degrees = AxisDegrees(
            whole | dict(zip(STACK_AXES, ici, strict=True)), whole | dict(zip(STACK_AXES, dcn, strict=True))
        )
        try:
            stack.check(degrees)
        except UserError:
            continue  # not legal
        yield [f"{key}={degree}" for key, degree in keys.items()]


def _splits(size: int) -> list[tuple[int, ...]]:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return [(a, b, size // (a * b)) for a in divisors for b in divisors if size % (a * b) == 0]


def plain_flops_per_s(stack: Stack, devices: SliceDevices, repeats: int = 5) -> float:
    """The best rate of one device at jnp.matmul alone, at the shape and type of the stack, all devices at once."""
    mesh = Mesh(devices.array.reshape(-1), "all")
    rows = NamedSharding(mesh, PartitionSpec("all"))
    whole = NamedSharding(mesh, PartitionSpec())
    B, D, F = stack.rows * mesh.devices.size, stack.d_model, stack.d_ff
    ones = jax.jit(
        lambda: (jnp.ones((B, D), stack.dtype), jnp.ones((D, F), stack.dtype)), out_shardings=(rows, whole)
    )
    multiply = jax.jit(jnp.matmul, out_shardings=rows)
    operands = ones()
    best_s = min(_seconds(lambda: multiply(*operands)) for _ in range(repeats + 1))
    return 2.0 * stack.rows * D * F / best_s


def known_cluster(devices: SliceDevices) -> Cluster | None:
    """The catalog's name for these devices, None where it has none (a CPU)."""
    first = devices.array.flat[0]
    chip = chips.of_device_kind(first.device_kind)
    if chip is None or first.platform != "tpu":
        return None
    found = [device.coords for device in devices.array[0]]
    shape = [1 + max(axis) - min(axis) for axis in zip(*found, strict=True)][: chip.ici_dims]
    return slices.cluster(f"{chip.name}:{'x'.join(map(str, shape))}", devices.num_slices)


def _times(stack: Stack, mesh: Mesh, steps: int) -> tuple[tuple[float, ...], str]:
    """Seconds of each step, or none and what some process lacks."""
    step = jax.jit(_step(stack), donate_argnums=0)
    start = jax.jit(lambda: _start(stack, mesh.devices.size))

    def begin() -> tuple:
        weights, x_BD = start()
        return _compiled(step.lower(weights, x_BD), mesh), weights, x_BD

    begun, lack = _if_it_fits(begin)
    if begun is None:
        return (), lack
    compiled, weights, x_BD = begun
    weights, lack = _if_it_fits(lambda: jax.block_until_ready(compiled(weights, x_BD)))
    if weights is None:
        return (), lack
    times = []
    for _ in range(steps):
        begin_s = time.perf_counter()
        weights = jax.block_until_ready(compiled(weights, x_BD))
        times.append(time.perf_counter() - begin_s)
    return tuple(times), ""


def _if_it_fits(attempt: Callable[[], Any]) -> tuple[Any, str]:
    """What ``attempt`` returns, or None and what the first process lacks that ran out of memory: all processes go on
    alike."""
    result, lack = None, ""
    try:
        result = attempt()
    except Exception as e:
        if not (lack := out_of_memory(e)):
            raise
    lacks = [lack for lack in together.gather("fits", lack) if lack]
    return (None, lacks[0]) if lacks else (result, "")


def _compiled(lowered: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
    """On a CPU, products by oneDNN: the compiler's own choice for a transposed bfloat16 operand is 2.3 times slower.

    Such a program cannot be written to JAX's cache, which would try, run out of memory and warn.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return lowered.compile()
    least_s = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, least_s)
    jax.config.update(least_s, math.inf)
    try:
        return lowered.compile(compiler_options={"xla_cpu_experimental_onednn_custom_call": True})
    finally:
        jax.config.update(least_s, before)


def _seconds(run: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin_s


def _start(stack: Stack, devices: int) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array]:
    """Weights of every layer, and the input of all devices."""
    D, F = stack.d_model, stack.d_ff
    keys = iter(jax.random.split(jax.random.key(0), 2 * stack.layers + 1))

    def normal(shape: tuple[int, int], *dims: str) -> jax.Array:
        x = jax.random.normal(next(keys), shape, stack.dtype, out_sharding=partition(*dims))
        return x / jnp.asarray(math.sqrt(shape[0]), stack.dtype)

    weights = [(normal((D, F), "embed", "mlp"), normal((F, D), "mlp", "embed")) for _ in range(stack.layers)]
    shape = (stack.rows * devices, D)
    x_BD = jax.random.uniform(next(keys), shape, stack.dtype, out_sharding=partition("batch", "activation"))
    return weights, x_BD


def _step(stack: Stack) -> Callable[[Any, jax.Array], Any]:
    weight = weights_in(jnp.dtype(stack.dtype))

    def layer(x_BD: jax.Array, w_DF: jax.Array, w_FD: jax.Array) -> jax.Array:
        h_BF = jax.nn.sigmoid(linear(x_BD, weight(w_DF, "embed", "mlp"), partition("batch", "mlp")))
        return jax.nn.sigmoid(linear(h_BF, weight(w_FD, "mlp", "embed"), partition("batch", "activation")))

    layer = jax.checkpoint(layer, policy=checkpoint_policy(POLICIES["none"]))

    def loss(weights: Any, x_BD: jax.Array) -> jax.Array:
        for w_DF, w_FD in weights:
            x_BD = layer(x_BD, w_DF, w_FD)
        return x_BD.sum(dtype=jnp.float32)

    def step(weights: Any, x_BD: jax.Array) -> Any:
        gradients = jax.grad(loss)(weights, x_BD)
        return jax.tree.map(lambda w, g: w - jnp.asarray(LEARNING_RATE, w.dtype) * g, weights, gradients)

    return step
