"""Columns of weights over the axes that shard them as FSDP does: plan and train refuse in the same words."""

import math
from collections.abc import Iterable, Mapping

from slicewise.costs.layout import WEIGHT_AXES
from slicewise.errors import UserError


def product(degrees: Mapping[str, int], always: Iterable[str] = ("fsdp",)) -> str:
    """Such as 'data x fsdp parallelism': axes of one device are not worth a word, but for those ``always`` named."""
    return (
        " x ".join(axis for axis, degree in degrees.items() if degree > 1 or axis in always) + " parallelism"
    )


def check(model: str, dims: Iterable[tuple[int, str]], degrees: Mapping[str, int]) -> None:
    """Raises UserError where all of ``degrees`` (axis -> size) together do not divide ``dims`` (size, name) of
    ``model``."""
    ways = {axis: degrees.get(axis, 1) for axis in WEIGHT_AXES}
    sharded = math.prod(ways.values())
    for count, name in dims:
        if count % sharded:
            axes = product(ways)
            raise UserError(
                f"{axes}{' =' * (' x ' in axes)} {sharded} does not divide {name} = {count} of {model};"
                " use fewer fsdp and more data or tensor parallelism."
            )
