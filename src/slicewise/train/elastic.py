"""A run on fewer slices than it was submitted for: the same batches or smaller ones, on a layout that shrinks over DCN.

Imports no JAX: launchers ask which numbers of slices would do.
"""

import math
import os
from dataclasses import dataclass

from slicewise.config import AXES, RunConfig, resolve_degrees, with_overrides
from slicewise.errors import UserError

ALL_SLICES = "SLICEWISE_ALL_SLICES"  # environment: how many slices the job was submitted for
BATCH_AXES = ("data", "fsdp", "expert")  # that divide the batch: see parallel.rules
SHRINKING = ("data", "fsdp")  # over DCN, the first of these that can


@dataclass(frozen=True)
class Fitted:
    """A config, and what it becomes on the slices that are there."""

    asked: RunConfig
    config: RunConfig
    all_slices: int  # that the run was submitted for
    is_shrunk: bool = False

    @property
    def turns(self) -> int:
        """Steps that share out the rows of one batch of the asked size: 1 unless batches are smaller."""
        return self.asked.data.global_batch_size // self.config.data.global_batch_size


def fit(
    config: RunConfig, *, num_slices: int, devices_per_slice: int, all_slices: int | None = None
) -> Fitted:
    """``config`` for ``num_slices`` of the ``all_slices`` (default: what the environment says) that it was made for.

    Raises UserError when it cannot run on so few.
    """
    if all_slices is None:
        all_slices = int(os.environ.get(ALL_SLICES) or num_slices)
    if num_slices >= all_slices:
        return Fitted(config, config, num_slices)
    whole = resolve_degrees(config, num_slices=all_slices, devices_per_slice=devices_per_slice)
    dcn = _shrunk(dict(whole.dcn), num_slices, all_slices)
    shards = math.prod(whole.ici[axis] * dcn[axis] for axis in BATCH_AXES)
    rows, steps = config.data.global_batch_size, config.optimizer.gradient_accumulation_steps
    if rows % shards:
        raise UserError(
            f"global_batch_size = {rows} is not a multiple of the {shards} data shards on {num_slices} of"
            f" {all_slices} slices; choose one that is, or min_slices = {all_slices}."
        )
    overrides = [f"dcn_{axis}_parallelism={degree}" for axis, degree in dcn.items()]
    overrides.append("executable=")  # which is of the whole layout
    if config.parallelism.elastic == "batch":
        overrides.append(f"global_batch_size={_smaller_batch(rows, shards * steps, num_slices, all_slices)}")
    else:
        most = rows // shards  # sequences of a shard
        least = min(most, -(-steps * all_slices // num_slices))  # no more of them at once than on all slices
        parts = next(n for n in range(least, most + 1) if most % n == 0)
        overrides.append(f"gradient_accumulation_steps={parts}")
    return Fitted(config, with_overrides(config, overrides), all_slices, is_shrunk=True)


def _shrunk(dcn: dict[str, int], num_slices: int, all_slices: int) -> dict[str, int]:
    """Degrees over DCN whose product is ``num_slices`` instead of ``all_slices``."""
    for axis in SHRINKING:
        if dcn[axis] * num_slices % all_slices == 0:
            return dcn | {axis: dcn[axis] * num_slices // all_slices}
    shown = " x ".join(f"dcn_{axis}_parallelism={dcn[axis]}" for axis in AXES if dcn[axis] > 1)
    raise UserError(
        f"{shown} cannot shrink from {all_slices} slices to {num_slices}: data or fsdp parallelism over DCN would"
        " be no whole number."
    )


def _smaller_batch(rows: int, multiple: int, num_slices: int, all_slices: int) -> int:
    """The largest batch, at most in proportion, that divides ``rows`` and is a multiple of ``multiple``."""
    fitting = [n for n in range(multiple, rows * num_slices // all_slices + 1, multiple) if rows % n == 0]
    if not fitting:
        raise UserError(
            f"elastic = batch finds no smaller batch for {num_slices} of {all_slices} slices that divides"
            f" global_batch_size = {rows} and is a multiple of {multiple}; use elastic = accumulate."
        )
    return fitting[-1]


def sizes(config: RunConfig, *, all_slices: int, devices_per_slice: int) -> tuple[int, ...]:
    """The numbers of slices below ``all_slices`` with which the job may go on, the largest first; none if not elastic.

    Raises UserError when ``elastic`` is on and there is none, or min_slices is more than there are.
    """
    if config.parallelism.elastic == "off":
        return ()
    fewest, reason = config.parallelism.min_slices, None
    if fewest > all_slices:
        raise UserError(f"min_slices = {fewest} is more than the {all_slices} slices of the job.")
    found = []
    for count in range(all_slices - 1, fewest - 1, -1):
        try:
            fit(config, num_slices=count, devices_per_slice=devices_per_slice, all_slices=all_slices)
            found.append(count)
        except UserError as error:
            reason = error
    if not found and reason:
        raise reason
    return tuple(found)
