"""The sharding experiment: a bare stack of matrix products under a layout, and its price.

The program is the first of Google's Multislice guide: each layer multiplies by [D, 4 D] and by [4 D, D] with a sigmoid
behind each; the step is a gradient of the sum and a plain update of the weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from slicewise.catalog.slices import Cluster
from slicewise.config import AXES, AxisDegrees
from slicewise.costs.compute import Shard, matmul_s
from slicewise.costs.device import device_of
from slicewise.costs.layout import Degrees, Layout, Recipe
from slicewise.costs.remat import POLICIES
from slicewise.costs.shapes import Attention, Layer, Matmul
from slicewise.costs.step import layer_passes, network
from slicewise.costs.units import quantity
from slicewise.errors import UserError

STACK_AXES = ("data", "fsdp", "tensor")


@dataclass(frozen=True)
class Stack:
    rows: int  # of one device
    d_model: int
    layers: int
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @property
    def d_ff(self) -> int:
        return 4 * self.d_model

    @property
    def parameters(self) -> int:
        return 2 * self.d_model * self.d_ff * self.layers

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def flops(self) -> float:
        """FLOPs of one device's step as the guide counts them: those of the gradient by the input are among them,
        though nobody needs it and the compiler leaves them out."""
        return 6.0 * self.parameters * self.rows

    @property
    def parameter_bytes(self) -> int:
        """Of the whole model."""
        return self.itemsize * self.parameters

    def activation_bytes(self, devices: int) -> int:
        """Of all devices: the output of every product."""
        return self.itemsize * devices * self.rows * (self.d_model + self.d_ff) * self.layers

    def check_memory(self, held_bytes: float, owner: str, limit_bytes: float) -> None:
        """Raises UserError when ``held_bytes`` of weights and activations are more than ``owner`` has."""
        if held_bytes > limit_bytes:
            raise UserError(
                f"weights and activations take {quantity(held_bytes, 'B')}, {owner} has {quantity(limit_bytes, 'B')} of"
                " memory; lower --batch-size, --embedding-dimension or --layers."
            )

    def check(self, degrees: AxisDegrees) -> None:
        """Raises UserError when ``degrees`` does not divide the stack, or uses an axis that it has no use for."""
        for axis in AXES:
            if axis not in STACK_AXES and degrees.total(axis) > 1:
                raise UserError(f"a stack of matrices has no use for the {axis} axis; set its degrees to 1.")
        fsdp, tensor = degrees.total("fsdp"), degrees.total("tensor")
        if self.d_model % fsdp:
            raise UserError(
                f"fsdp parallelism {fsdp} does not divide --embedding-dimension {self.d_model}; use a multiple."
            )
        if self.d_ff % tensor:
            raise UserError(
                f"tensor parallelism {tensor} does not divide the width {self.d_ff}, which is 4 x"
                f" --embedding-dimension; use a multiple of {tensor} for it."
            )


@dataclass(frozen=True)
class Predicted:
    step_s: float
    exposed_s: Mapping[str, float]  # communication that compute does not hide, by axis


@dataclass(frozen=True)
class Measured:
    """One layout of a stack, run and timed."""

    degrees: AxisDegrees
    times_s: tuple[float, ...]  # of each step; none where it does not fit
    plan: Predicted | None  # None where the planner cannot say
    lack: str = ""  # of memory, where it does not fit: in words

    @property
    def step_s(self) -> float:
        return median(self.times_s) if self.times_s else math.inf


def predict(stack: Stack, cluster: Cluster, degrees: AxisDegrees) -> Predicted:
    """What the planner expects of ``stack`` on ``cluster``.

    Activations and their gradients pass through the sigmoid inside the products, so nothing but the products
    reads memory. The first product has no gradient by its input. Raises UserError for float32, for tensor
    parallelism over DCN, which has no price, and where the degrees do not fit.
    """
    if degrees.dcn["tensor"] > 1:
        raise UserError(
            f"dcn_tensor_parallelism = {degrees.dcn['tensor']}: a tensor axis between slices can be measured but not"
            " priced; leave out --chip and --topology where there are devices, or set it to 1."
        )
    if stack.dtype != "bfloat16":
        raise UserError(f"--dtype {stack.dtype}: only bfloat16 can be priced.")
    stack.check(degrees)
    layout = Layout(
        Degrees(**{axis: degrees.ici[axis] for axis in STACK_AXES}),
        Degrees(**{axis: degrees.dcn[axis] for axis in STACK_AXES}),
        global_batch=cluster.devices,
    )
    device, net = device_of(cluster.chip), network(cluster, layout)
    products = (
        Matmul("mlpwi_0", stack.d_model, stack.d_ff, "column"),
        Matmul("mlpwo", stack.d_ff, stack.d_model, "row"),
    )
    layer = Layer(stack.layers, products, Attention(0, 0, 1, 1), stack.d_model, norm_parameters=0)
    recipe = Recipe(POLICIES["none"], weight_bytes=2, moment_bytes=0, gradient_bytes=2, summed_bytes=2)
    tensor = degrees.ici["tensor"]
    work = Shard(stack.rows * tensor, stack.rows, tensor, 1, 1)
    total = 0.0
    exposed: dict[str, float] = {}
    for one in layer_passes(layer, work, device, net, layout, recipe, 1):
        bare = replace(one, compute=tuple(replace(part, memory=0.0) for part in one.compute))
        seconds, shown, _ = bare.time(device, recipe)
        total += stack.layers * float(seconds)
        for axis, spent in shown.items():
            if spent > 0:
                exposed[axis] = exposed.get(axis, 0.0) + stack.layers * float(spent)
    total -= float(matmul_s(products[0], work, device, recipe))
    return Predicted(total, exposed)
