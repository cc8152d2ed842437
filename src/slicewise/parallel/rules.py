"""The one table from logical dims of arrays to mesh axes, and the checks that a model fits a mesh."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from slicewise.catalog.chips import of_device_kind
from slicewise.catalog.model import ModelSpec
from slicewise.costs import columns
from slicewise.costs.experts import check_divided
from slicewise.costs.layout import WEIGHT_AXES
from slicewise.costs.pipeline import check_layers
from slicewise.errors import UserError

RULES: Mapping[str, str | tuple[str, ...]] = {
    "batch": ("pipeline", "data", "fsdp", "expert"),
    "sequence": "context",
    # the d_model dim of weights: gathered where a layer uses them
    "embed": WEIGHT_AXES,
    "latent": WEIGHT_AXES,  # the rank of latent attention in weights: as embed
    "experts": "expert",
    "expert_embed": (
        "pipeline",
        "fsdp",
        "context",
    ),  # of experts' weights, whose experts the expert axis divides
    "staged_layers": "pipeline",  # the layers that a pipeline divides; the others lie within a stage
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "tokens": ("context", "tensor"),  # the tokens of the residual stream: see residual
}
PIPELINE = "pipeline"
STAGE_AXES = ("pipeline", "data", "fsdp", "expert", "context")  # that a stage's code is mapped over
FSDP_DIMS = ("embed", "latent", "expert_embed")  # of weights, what fully sharded data parallelism divides
# dims that no axis divides
WHOLE = frozenset({"layers", "position", "slots", "activation", "head_dim", "lora"})
# Chips on which matrices of heads stay as they are gathered: by the compiler's cycles a step of Llama 3 8B is 4 % and
# 9 % shorter there, on v5e and v5p 0.5 % and 1.4 % longer.
AS_GATHERED = frozenset({"v6e", "tpu7x"})


def partition(*dims: str) -> PartitionSpec:
    """The PartitionSpec of an array with these logical dims.

    The pipeline axis divides the first dim that has it: staged layers, or outside of them what fsdp divides. Within a
    stage only the axes that are left divide anything.
    """
    assert all(dim in RULES or dim in WHOLE for dim in dims), dims
    used = {*STAGE_AXES} if in_stage() else set()
    entries: list[Any] = []
    for dim in dims:
        rule = RULES.get(dim, ())
        axes = tuple(axis for axis in ((rule,) if isinstance(rule, str) else rule) if axis not in used)
        used.update(axes)
        entries.append(axes[0] if len(axes) == 1 else axes or None)
    return PartitionSpec(*entries)


def in_stage() -> bool:
    """Whether the code in force is that of one stage of a pipeline, see parallel.pipeline."""
    return {*jax.sharding.get_abstract_mesh().manual_axes} == {*STAGE_AXES}


def unmapped() -> tuple[str, ...]:
    """The mesh axes that shard_map can still map: all of them, or within a stage the others."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return tuple(axis for axis in names if axis not in STAGE_AXES) if in_stage() else names


def residual(tokens: int) -> PartitionSpec:
    """Of the residual stream [B, T, D] with T = ``tokens``: divided over the tensor axis too, where it divides T.

    So a norm, a sum or a saved layer input is of a device's own tokens only; what a tensor-parallel product needs is
    gathered just before it, and its partial sums are scattered instead of reduced whole (Korthikanti et al., 2022).
    """
    mesh = jax.sharding.get_abstract_mesh().shape
    ways = mesh.get("tensor", 1) * (1 if in_stage() else mesh.get("context", 1))
    return partition("batch", "tokens" if tokens % ways == 0 else "sequence", "activation")


def gathered(weight: jax.Array, *dims: str) -> jax.Array:
    """``weight`` with its embed or latent dim whole on every device: the all-gather of fully sharded data parallelism.

    The transpose, in the backward pass, is the reduce-scatter of the gradient.
    """
    whole = ("activation" if dim in ("embed", "latent") else dim for dim in dims)
    return as_gathered(jax.sharding.reshard(weight, partition(*whole)), weight)


def as_gathered(whole: jax.Array, weight: jax.Array) -> jax.Array:
    """``whole``, in the order in which the gather of ``weight`` leaves it: the dim that was divided outermost.

    Else the compiler turns over the matrices of heads in every layer and pass of the chips AS_GATHERED.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    chip = of_device_kind(device.device_kind) if device else None
    if whole.ndim < 3 or chip is None or chip.name not in AS_GATHERED:
        return whole
    had, has = (jax.typeof(x).sharding.spec for x in (weight, whole))
    divided = [dim for dim, (a, b) in enumerate(zip(had, has, strict=True)) if _ways(a) > _ways(b)]
    rest = [dim for dim in range(whole.ndim) if dim not in divided]
    return with_layout_constraint(whole, Layout((*divided, *rest))) if divided else whole


def _ways(entry: Any) -> int:
    """That an entry of a PartitionSpec divides a dim in."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in ((entry,) if isinstance(entry, str) else entry or ()))


def unstacked(stack: jax.Array, by: int) -> jax.Array:
    """[L, ...] as [L / by, by, ...]."""
    spec = jax.typeof(stack).sharding.spec
    shape = (-1, by, *stack.shape[1:])
    return jnp.reshape(stack, shape, out_sharding=PartitionSpec(spec[0], None, *spec[1:]))


def unscattered(grad: jax.Array, x: jax.Array, lead: int) -> jax.Array:
    """The gradient of a product, its first ``lead`` dims laid out as those of ``x``: gathered if need be."""
    spec, ours = jax.typeof(grad).sharding.spec, jax.typeof(x).sharding.spec
    return jax.sharding.reshard(grad, PartitionSpec(*ours[:lead], *spec[lead:]))


def check(spec: ModelSpec, global_batch_size: int, degrees: Mapping[str, int]) -> None:
    """Raises UserError when ``degrees`` (mesh axis -> size) does not divide the dims that it shards."""
    tensor, expert, stages = degrees["tensor"], degrees["expert"], degrees.get(PIPELINE, 1)
    rows = stages * degrees["fsdp"] * expert
    check_layers(spec.name, spec.staged_groups, stages)
    for count, name in _tensor_dims(spec):
        if count % tensor:
            raise UserError(
                f"tensor parallelism {tensor} does not divide {name} = {count} of {spec.name};"
                f" choose one of {_divisors(count)}."
            )
    check_divided(spec.name, is_sparse=spec.experts is not None, ways=expert)
    if spec.experts and spec.experts.experts % expert:
        raise UserError(
            f"expert parallelism {expert} does not divide the {spec.experts.experts} experts of {spec.name};"
            f" choose one of {_divisors(spec.experts.experts)}."
        )
    columns.check(spec.name, _sharded_dims(spec), degrees)
    batch = degrees["data"] * rows
    if global_batch_size % batch:
        below = global_batch_size - global_batch_size % batch
        near = f"{below} or {below + batch}" if below else f"{batch}, or context parallelism for sequences"
        ways = {"data": degrees["data"], "pipeline": stages, "fsdp": degrees["fsdp"], "expert": expert}
        axes = columns.product(ways, always=("data", "fsdp"))
        raise UserError(
            f"global_batch_size = {global_batch_size} is not a multiple of {axes} = {batch}; use {near}."
        )


def _tensor_dims(spec: ModelSpec) -> list[tuple[int, str]]:
    dims = [(spec.heads, "heads"), (spec.kv_heads, "kv_heads")]
    if not spec.experts or not all(map(spec.layer_is_sparse, range(spec.layers))):
        dims.append((spec.d_ff, "d_ff"))
    if e := spec.experts:
        dims.append((e.d_ff, "experts.d_ff"))
        dims += [(e.shared_d_ff, "experts.shared_d_ff")] if e.shared_d_ff else []
    return dims


def _sharded_dims(spec: ModelSpec) -> list[tuple[int, str]]:
    dims = [(spec.d_model, "d_model")]
    if a := spec.latent_attention:
        dims.append((a.kv_lora_rank, "latent_attention.kv_lora_rank"))
        dims += [(a.q_lora_rank, "latent_attention.q_lora_rank")] if a.q_lora_rank else []
    return dims


def _divisors(count: int) -> str:
    return ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)
