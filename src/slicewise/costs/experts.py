"""What mixtures of experts allow the axes of a mesh: plan and train refuse in the same words."""

from slicewise.errors import UserError


def check_divided(model: str, *, is_sparse: bool, ways: int) -> None:
    """Raises UserError for experts of ``model`` divided in ``ways`` where it has none."""
    if ways > 1 and not is_sparse:
        raise UserError(
            f"expert = {ways} needs a mixture of experts, which {model} is not; use fsdp parallelism instead."
        )


def check_capacity(context: int, *, is_capacity: bool) -> None:
    """Raises UserError for sequences divided in ``context`` whose experts have a capacity."""
    if context > 1 and is_capacity:
        raise UserError(
            f"moe_dispatch = capacity counts the tokens of whole sequences, which context = {context} divides; use"
            " dropless."
        )
