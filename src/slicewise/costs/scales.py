"""How operands of 8-bit products may be scaled: plan and train refuse in the same words."""

from slicewise.errors import UserError

RANGES = (1e-6, 1e6)  # that a fixed range may be: the product of two scales is a float32


def check(*, fixed_range: float, calibrate_every: int, scaling: str) -> None:
    """Raises UserError for a fixed range that is none, and for what a calibrated scale does not go with."""
    if fixed_range and not RANGES[0] <= fixed_range <= RANGES[1]:
        raise UserError(
            f"quantization_fixed_range = {fixed_range:g}: expected {RANGES[0]:g} to {RANGES[1]:g}, such as 8, or 0"
            " for the largest value of each step."
        )
    if calibrate_every and (fixed_range or scaling != "tensor"):
        other = (
            f"quantization_fixed_range = {fixed_range}"
            if fixed_range
            else f"quantization_scaling = '{scaling}'"
        )
        raise UserError(
            f"quantization_calibrate_every does not go with {other}: a calibrated scale is one for a tensor; leave"
            " one of them out."
        )


def check_staged(stages: int, calibrate_every: int) -> None:
    """Raises UserError for calibrated scales within the ``stages`` of a pipeline."""
    if stages > 1 and calibrate_every:
        raise UserError(
            f"quantization_calibrate_every = {calibrate_every} does not go with a pipeline, whose stages know no"
            " ranges; set it to 0."
        )
