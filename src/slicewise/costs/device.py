"""What one JAX device can do: the catalog's figures of its chip and the few constants fitted per chip."""

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from slicewise.catalog.chips import Chip

HOST_SHARE = 0.85  # of host memory that offloaded activations can have
FLOPS_PER_CYCLE = {
    128: 131072,
    256: 524288,
}  # bf16, of one core by size of its matrix units, as compilers count


@dataclass(frozen=True)
class Calibration:
    """Achievable shares of the catalog's figures on one chip; `calibration.toml` says how each was fitted."""

    matmul_efficiency: float  # of peak FLOP/s, for matmuls of whole tiles
    hbm_efficiency: float
    ici_efficiency: float
    overlap: float  # share of a collective that can run behind compute
    host_bytes_per_s: float | None = None  # of one device, where the catalog's PCIe rate is a generic one


@dataclass(frozen=True)
class Kernels:
    """Constants of the software, the same on every chip; `calibration.toml` says how each was fitted."""

    grid_step_us: float  # of a Pallas kernel: starting the copies of one grid step
    attention_mxu_overhead: float  # time of the attention kernel over that of its matmuls, where those decide
    gather_efficiency: float  # of memory bandwidth when rows are moved by index
    grouped_efficiency: float  # of a grouped matmul over a plain one
    host_efficiency: float  # of the catalog's PCIe rate
    tensor_overlap: float  # share of a tensor collective that runs behind the matmul it feeds
    straggler: float  # share of the step lost per doubling of the slices


@dataclass(frozen=True)
class Device:
    """One JAX device (TPU7x: half a chip). Rates in units per second; links one way."""

    name: str
    per_chip: int
    flops_per_s: float
    int8_flops_per_s: float  # the bf16 rate where the chip has no such unit
    fp8_flops_per_s: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float  # ICI, one link of the chip
    torus: bool
    hop_s: float
    dcn_bytes_per_s: float
    host_bytes_per_s: float
    host_memory_bytes: float  # for offloaded activations; infinite where the catalog has no figure
    cores: int  # TensorCores of the device
    clock_hz: float
    mxu: int
    calibration: Calibration
    kernels: Kernels

    def peak_flops_per_s(self, precision: str) -> float:
        rates = {"int8": self.int8_flops_per_s, "fp8": self.fp8_flops_per_s}
        return rates.get(precision, self.flops_per_s)


@functools.cache
def calibrations() -> tuple[Mapping[str, Calibration], Kernels]:
    text = (resources.files("slicewise.costs") / "calibration.toml").read_text()
    tables = tomllib.loads(text)
    kernels = Kernels(**tables.pop("kernels"))
    return {name: Calibration(**values) for name, values in tables.items()}, kernels


@functools.cache
def device_of(chip: Chip) -> Device:
    """The device of ``chip``, with the constants fitted for it, or the default ones for a chip never
    fitted."""
    known, kernels = calibrations()
    n = chip.jax_devices
    cores = max(1, chip.cores // n) if chip.kind == "tpu" else 1
    # Chips that the catalog's host memory serves.
    host_chips = 8 if chip.ici_dims == 2 else math.prod(chip.host_shape)
    calibration = known.get(chip.name, known["default"])
    egress = chip.levels[0].egress_bytes_per_s if chip.levels else 0.0
    return Device(
        name=chip.name,
        per_chip=n,
        flops_per_s=chip.bf16_flops_per_s / n,
        int8_flops_per_s=(chip.int8_flops_per_s or chip.bf16_flops_per_s) / n,
        fp8_flops_per_s=(chip.fp8_flops_per_s or chip.bf16_flops_per_s) / n,
        hbm_bytes=chip.usable_hbm_bytes_per_device,
        hbm_bytes_per_s=chip.hbm_bytes_per_s / n,
        link_bytes_per_s=chip.ici_link_bytes_per_s or egress,
        torus=chip.ici_dims > 0,
        hop_s=chip.hop_s,
        dcn_bytes_per_s=chip.dcn_bytes_per_s / n,
        host_bytes_per_s=calibration.host_bytes_per_s or kernels.host_efficiency * chip.pcie_bytes_per_s / n,
        host_memory_bytes=HOST_SHARE * chip.host_ram_bytes / host_chips / n
        if chip.host_ram_bytes
        else math.inf,
        cores=cores,
        clock_hz=chip.bf16_flops_per_s / n / cores / FLOPS_PER_CYCLE.get(chip.mxu_dim, 131072),
        mxu=chip.mxu_dim,
        calibration=calibration,
        kernels=kernels,
    )
