"""What config and devices settle before a step is traced: kernels, 8-bit products, compiler flags.

The devices need not be there: a mesh of a compile-only topology settles what real devices would.
"""

import math
import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from slicewise.catalog import chips, flags
from slicewise.catalog.model import ModelSpec
from slicewise.config import RunConfig
from slicewise.costs import scales
from slicewise.costs.adapters import Lora
from slicewise.costs.adapters import check as check_lora
from slicewise.costs.pipeline import check_remat, settled
from slicewise.errors import ExitCode, UserError
from slicewise.kernels import tuned
from slicewise.kernels.attention import api as attention
from slicewise.kernels.grouped_matmul import api as grouped_matmul
from slicewise.model import lora, params
from slicewise.model.quantization import Quantization, check
from slicewise.parallel.pipeline import Pipeline
from slicewise.parallel.rules import PIPELINE, RULES


def kernels(config: RunConfig, spec: ModelSpec, mesh: Mesh) -> dict[str, Any]:
    """Arguments of transformer.states. Raises UserError where what was asked for cannot run."""
    return {
        "kernel": attention.choose(
            config.model.attention,
            mesh,
            config.data.sequence_length,
            config.model.use_max_logits_estimate,
            config.compiler.scoped_vmem_limit_kib,
            config.parallelism.context_strategy,
        ),
        "grouped": (
            grouped_matmul.choose(mesh, config.compiler.scoped_vmem_limit_kib)
            if spec.experts
            else grouped_matmul.REFERENCE
        ),
        "quantization": quantization(config, spec),
        "pipeline": pipeline(config, spec, mesh),
    }


def pipeline(config: RunConfig, spec: ModelSpec, mesh: Mesh) -> Pipeline | None:
    """How layers pass through stages; None on a mesh without. Raises UserError where they cannot."""
    degrees = dict(mesh.shape)
    shards = math.prod(degrees[axis] for axis in RULES["batch"] if axis != PIPELINE)
    keys = config.parallelism
    microbatches = settled(
        spec.name,
        spec.staged_groups,
        stages=degrees[PIPELINE],
        shards=shards,
        batch=config.data.global_batch_size,
        steps=config.optimizer.gradient_accumulation_steps,
        asked=keys.pipeline_microbatches,
        repeats=keys.pipeline_repeats,
    )
    if degrees[PIPELINE] == 1:
        return None
    check_remat(degrees[PIPELINE], config.remat)
    if config.quantization != "none":
        scales.check_staged(degrees[PIPELINE], config.model.quantization_calibrate_every)
    return Pipeline(microbatches, keys.pipeline_repeats, keys.pipeline_gather)


def quantization(config: RunConfig, spec: ModelSpec) -> Quantization | None:
    """What the config's keys ask for. Raises UserError where it cannot be done."""
    model, name = config.model, config.quantization
    if name == "none":
        return None
    how = Quantization(
        name,
        model.quantization_layers,
        model.quantization_scaling,
        model.quantization_tile,
        model.quantization_fixed_range,
        model.quantization_stochastic_rounding,
        calibrated=model.quantization_calibrate_every > 0,
    )
    check(how, params.weights(spec).layers)
    return how


def check_same_settings(config: RunConfig, spec: ModelSpec, mesh: Mesh) -> None:
    """Raises UserError where processes have different tables of tuned settings: each would compile a program of its
    own. Every process of the job calls it."""
    if jax.process_count() == 1 or kernels(config, spec, mesh)["kernel"].name == "reference":
        return
    mine = np.uint32(zlib.crc32(tuned.digest().encode()))
    if len(set(multihost_utils.process_allgather(mine).tolist())) > 1:
        raise UserError(
            f"hosts have different {tuned.own_path().name} of 'slicewise tune'; copy one to {tuned.own_path()} on all"
            " of them, or remove it there."
        )


def adapters(config: RunConfig, spec: ModelSpec) -> Lora | None:
    """What the config's keys of LoRA ask for. Raises UserError where it cannot be done."""
    found = config.adapters
    if found is None:
        return None
    check_lora(found, config.optimizer.optimizer_type, config.quantization)
    lora.check(found, spec, params.weights(spec))
    return found


def compiler_options(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    """The compiler's options for the devices of ``mesh``; none where they are not TPUs of the catalog.

    Raises UserError for flags that the chip or the compiler does not have.
    """
    device = mesh.devices.flat[0]
    chip = chips.of_device_kind(device.device_kind)
    asked, limit_kib = config.compiler.compiler_flags, config.compiler.scoped_vmem_limit_kib
    if device.platform != "tpu" or chip is None:
        flags.check_names(asked)  # which are without effect here: what is wrong should not wait for a TPU
        return {}
    offloads = bool(config.remat.offloaded)
    num_slices = len({getattr(d, "slice_index", None) or 0 for d in mesh.devices.flat})
    return dict(flags.resolve(asked, chip.name, limit_kib, offloads=offloads, num_slices=num_slices))


def notes(config: RunConfig, spec: ModelSpec, mesh: Mesh) -> list[str]:
    """What the user should know of these choices at the start of a run."""
    found = []
    if (warmup := config.warmup_steps) > config.run.steps:
        found.append(
            f"warning: warmup_steps = {warmup} is more than steps = {config.run.steps}: the learning rate never"
            f" reaches {config.optimizer.learning_rate:g}."
        )
    chip = chips.of_device_kind(mesh.devices.flat[0].device_kind)
    estimate, kernel = config.model.use_max_logits_estimate, kernels(config, spec, mesh)["kernel"].name
    if estimate and kernel != "splash":
        found.append(
            f"use_max_logits_estimate = {estimate:g} changes nothing here, where attention is '{kernel}'; the logits"
            " above it are counted."
        )
    how = quantization(config, spec)
    if how and chip and (note := chips.saves_bytes_only(chip, how.name)):
        found.append(note)
    if options := compiler_options(config, mesh):
        found.append(f"compiler flags: {' '.join(f'{flag}={value}' for flag, value in options.items())}")
    return found


def expected_kernels(config: RunConfig, spec: ModelSpec, mesh: Mesh) -> tuple[str, ...]:
    """Parts of the names of the kernels that the program of a step must call."""
    chosen = kernels(config, spec, mesh)
    names = ["splash"] if chosen["kernel"].name == "splash" else []
    dropless = spec.experts is not None and config.model.moe_dispatch == "dropless"
    return (*names, "ragged_dot_gmm") if dropless and chosen["grouped"].name == "mosaic" else tuple(names)


def check_kernels(expected: tuple[str, ...], program: str) -> None:
    """Raises UserError when the lowered ``program`` lacks a kernel of expected_kernels: nothing falls back unseen."""
    if missing := [name for name in expected if f"{name}" not in program]:
        raise UserError(
            f"the compiled step does not call the kernel {missing[0]} that was chosen for it; report it, or choose"
            " attention = 'xla_chunked'.",
            code=ExitCode.INTERNAL,
        )
