"""Values that the types of keys allow and no run takes: refused where a config is read, before a model or a device."""

from collections.abc import Mapping
from typing import Any

from slicewise.catalog import flags
from slicewise.costs import adapters, scales

Keys = Mapping[str, Any]


def check(values: Keys, asked: Keys) -> None:
    """Raises UserError for such a value of ``asked``, the keys that somebody set; ``values`` are all of the config."""
    if "compiler_flags" in asked:
        flags.check_names(asked["compiler_flags"])
    if "scoped_vmem_limit_kib" in asked:
        flags.check_least_vmem(asked["scoped_vmem_limit_kib"])
    if "lora_layers" in asked:
        adapters.check_pattern("lora_layers", asked["lora_layers"])
    if values["quantization"] == "none" or not values["use_qwix_quantization"]:
        return
    if "quantization_layers" in asked:
        adapters.check_pattern("quantization_layers", asked["quantization_layers"])
    if any(key.startswith("quantization_") for key in asked):
        scales.check(
            fixed_range=values["quantization_fixed_range"],
            calibrate_every=values["quantization_calibrate_every"],
            scaling=values["quantization_scaling"],
        )
