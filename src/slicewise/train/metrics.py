"""Where the numbers of a run go: JSON lines, TensorBoard event files, and figures a person reads."""

import json
import math
import time
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slicewise.catalog.model import ModelSpec
from slicewise.costs.params import parameter_count

# bfloat16 FLOP/s of one JAX device, from the vendor's data sheets
PEAK_FLOPS_PER_S = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12 / 2,
}


def training_flops_per_token(spec: ModelSpec, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token: 6 per active matrix weight, plus causal attention.

    Attention: 12 L N H T halved, as a token sees half the sequence on average (no window shortens it here).
    """
    count = parameter_count(spec)
    matrices = count.active - (0 if spec.tied_embeddings else count.embedding)
    context = min(sequence_length, 2 * (spec.sliding_window or sequence_length))
    return 6 * matrices + 6 * spec.layers * spec.heads * spec.head_dim * context


def peak_flops_per_s(mesh: Mesh) -> float:
    """Peak FLOP/s of one device: published for a TPU, measured on anything else (all devices at once)."""
    kind = mesh.devices.flat[0].device_kind
    return PEAK_FLOPS_PER_S.get(kind) or _measured_peak(mesh)


def _measured_peak(mesh: Mesh, size: int = 768, repeats: int = 3) -> float:
    """The best rate of a float32 ``size`` x ``size`` matrix product on each of ``mesh``'s devices."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.devices.size, size, size)
    ones = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=sharding)
    multiply = jax.jit(lambda a, b: jnp.einsum("Nij,Njk->Nik", a, b))
    with jax.set_mesh(mesh):
        a = ones()
        multiply(a, a).block_until_ready()
        best_s = math.inf
        for _ in range(repeats):
            start_s = time.perf_counter()
            multiply(a, a).block_until_ready()
            best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * size**3 / best_s


class MetricWriter:
    """Appends records to metrics.jsonl and, when asked, to TensorBoard event files under ``directory``.

    Records after ``from_step`` are dropped first: they belong to steps that were lost and are taken again.
    """

    def __init__(self, directory: Path, *, from_step: int, tensorboard: bool):
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= from_step]
        path.write_text("".join(kept))
        self._file = path.open("a", buffering=1)
        self._events: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(
                str(directory / "tensorboard"), purge_step=from_step + 1 if from_step else None
            )

    def write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        if self._events:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._events:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _complete_lines(path: Path) -> list[str]:
    """The lines of ``path``; the last one may be cut off when its writer was killed, and is then left out."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
