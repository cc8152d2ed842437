"""What errors of the runtime mean, where a person can do something about them."""

import re

from slicewise.config import RunConfig
from slicewise.errors import ExitCode, UserError

_BYTES = re.compile(r"(?:allocat\w+|reserve) ([\d.]+ ?[KMGT]?i?B?(?:ytes)?)", re.I)
_COLLECTIVE = re.compile(r"Gloo|collective|Connection (?:closed|reset) by peer|coordination service", re.I)


def out_of_memory(error: Exception) -> str:
    """Who lacks how much, such as 'out of memory: a device cannot give 3.1G'; "" where ``error`` is of another kind."""
    text = str(error).strip().split("\n")[0]
    if not (
        isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    ):
        return ""
    wanted = found[1] if (found := _BYTES.search(text)) else "what the step needs"
    who = "this machine" if isinstance(error, MemoryError) else "a device"
    return f"out of memory: {who} cannot give {wanted}"


def explained(error: Exception, config: RunConfig, *, has_stepped: bool) -> Exception:
    """``error`` in a line of advice, or itself where there is none.

    Out of memory before the first step the config is at fault; later, something else in this machine's memory is.
    """
    text = str(error).strip().split("\n")[0]
    if "overflow in static extent" in text:
        data = config.data
        return UserError(
            f"no array can be as large as a step of global_batch_size = {data.global_batch_size} sequences of"
            f" sequence_length = {data.sequence_length} needs; lower one of them."
        )
    if lack := out_of_memory(error):
        return UserError(
            f"{lack}; lower global_batch_size or sequence_length, raise"
            f" gradient_accumulation_steps (now {config.optimizer.gradient_accumulation_steps}), choose a"
            f" remat_policy that keeps less (now {config.model.remat_policy}), or more fsdp parallelism.",
            code=ExitCode.INTERNAL if has_stepped else ExitCode.USER,
        )
    if _COLLECTIVE.search(text):
        return UserError(
            f"a collective failed: another worker has ended or does not answer ({text[:200]}).",
            code=ExitCode.INTERNAL,
        )
    return error
