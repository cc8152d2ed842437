"""Keys of a config that the rest of it, its model or its devices leave without an effect: they are refused, for whoever
sets one expects something of it.

``asked`` are the keys that somebody set to another value than the default. One that says 0 or nothing is true anyway.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slicewise.costs.remat import ALIASES, plain_name
from slicewise.costs.shapes import ModelShape
from slicewise.errors import UserError

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Need:
    """``keys`` have an effect only where the value of ``of`` is one that ``is_met`` takes."""

    keys: tuple[str, ...]
    of: str
    is_met: Callable[[Any], bool]
    advice: str


NEEDS = (
    Need(
        (
            "quantization_layers",
            "quantization_scaling",
            "quantization_tile",
            "quantization_fixed_range",
            "quantization_calibrate_every",
            "quantization_stochastic_rounding",
        ),
        "quantization",
        lambda name: name != "none",
        "choose fp8, fp8_e4m3 or int8",
    ),
    Need(("quantization_tile",), "quantization_scaling", lambda name: name == "tile", "set it to tile"),
    Need(
        ("use_max_logits_estimate",),
        "attention",
        lambda name: name in ("auto", "splash"),
        "set it to auto or splash",
    ),
    Need(("lora_alpha", "lora_layers", "lora_base_dtype"), "lora_rank", bool, "set it above 0"),
    Need(("min_slices",), "elastic", lambda name: name != "off", "set it to accumulate or batch"),
    Need(("rollback_steps",), "on_bad_step", lambda name: name == "rollback", "set it to rollback"),
    Need(("profile_from",), "profile_steps", bool, "set it above 0"),
)


def check_keys(values: Keys, asked: Keys) -> None:
    """Raises UserError for a key that others of ``values``, all keys of the config, leave without an effect."""
    for key, need in idle(values, asked):
        other = f"{need.of} = {values[need.of]}"
        raise _without_effect(key, asked[key], f"with {other}; {need.advice}, or leave {key} out")


def idle(values: Keys, asked: Keys) -> Iterator[tuple[str, Need]]:
    """The keys of ``asked`` that others of ``values`` leave without an effect, and what they would need."""
    for need in NEEDS:
        if need.is_met(values[need.of]):
            continue
        if need.of == "quantization" and not values["use_qwix_quantization"]:
            continue  # which switches off whatever the others say
        yield from ((key, need) for key in need.keys if asked.get(key))


def check_model(shape: ModelShape, asked: Keys) -> None:
    """Raises UserError for a key that is about what the model does not have."""
    experts = ("moe_dispatch", "capacity_factor", "load_balance_loss_weight")
    if not shape.routed_parameters:
        for key in filter(asked.get, experts):
            raise _without_effect(key, asked[key], f"on {shape.name}, which has no experts; leave it out")
    if asked.get("prediction_loss_weight") and not shape.prediction_heads:
        raise _without_effect(
            "prediction_loss_weight",
            asked["prediction_loss_weight"],
            f"on {shape.name}, which has no layers of multi-token prediction; leave it out",
        )
    names = tensors(shape)
    for given, place in asked.get("remat_tensors", {}).items():
        name = plain_name(given)
        if place != "remat" and not names.intersection(ALIASES.get(name, (name,))):
            known = ", ".join(sorted(names))
            raise UserError(f"remat_tensors: {shape.name} has no tensor {given}; it has {known}.")


def tensors(shape: ModelShape) -> set[str]:
    """The activations of its layers that remat_tensors can name."""
    products = (m.name for layer in shape.layers for m in layer.matmuls if m.name != "router")
    return {"decoder_layer_input", "context", *map(plain_name, products)}


def check_layout(degrees: Mapping[str, int], num_slices: int, asked: Keys) -> None:
    """Raises UserError for a key that is about an axis of degree 1. ``degrees`` are those over both networks."""
    for key, axis in (("context_strategy", "context"), ("pipeline_gather", "pipeline")):
        if asked.get(key) and degrees[axis] == 1:
            raise _without_effect(
                key,
                asked[key],
                f"without {axis} parallelism; set ici_{axis}_parallelism or dcn_{axis}_parallelism above 1, or leave it"
                " out",
            )
    if asked.get("min_slices", 1) > num_slices:
        many = f"{num_slices} slices" if num_slices > 1 else "1 slice"
        raise UserError(
            f"min_slices = {asked['min_slices']} is more than the {many} of the run; lower it, or ask for more slices."
        )


def _without_effect(key: str, value: Any, why: str) -> UserError:
    shown = f"'{value}'" if key == "quantization_layers" or key == "lora_layers" else value
    return UserError(f"{key} = {str(shown).lower() if value is True else shown} has no effect {why}.")
