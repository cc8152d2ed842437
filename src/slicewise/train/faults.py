"""What errors of the runtime mean, where a person can do something about them."""

import re

from jax.errors import JaxRuntimeError

from slicewise.config import RunConfig
from slicewise.errors import ExitCode, UserError

_BYTES = re.compile(r"(?:allocat\w+|reserve) ([\d.]+ ?[KMGT]?i?B?(?:ytes)?)", re.I)
_COLLECTIVE = re.compile(r"Gloo|collective|Connection (?:closed|reset) by peer|coordination service", re.I)


def explained(error: JaxRuntimeError, config: RunConfig, *, has_stepped: bool) -> Exception:
    """``error`` in a line of advice, or itself where there is none.

    Out of memory before the first step the config is at fault; later, something else in this machine's memory is.
    """
    text = str(error).strip().split("\n")[0]
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        wanted = found[1] if (found := _BYTES.search(text)) else "what the step needs"
        return UserError(
            f"out of memory: a device cannot give {wanted}; raise gradient_accumulation_steps (now"
            f" {config.optimizer.gradient_accumulation_steps}), choose a remat_policy that keeps less (now"
            f" {config.model.remat_policy}), or more fsdp parallelism.",
            code=ExitCode.INTERNAL if has_stepped else ExitCode.USER,
        )
    if _COLLECTIVE.search(text):
        return UserError(
            f"a collective failed: another worker has ended or does not answer ({text[:200]}).",
            code=ExitCode.INTERNAL,
        )
    return error
