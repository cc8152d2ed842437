"""Rematerialisation policies: which named activations of a layer are kept, kept on the host, or recomputed.

Names of policies and tensors mean what they mean in MaxText. A routed MLP's tensors answer to the dense
names too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slicewise.costs.shapes import Layer
from slicewise.errors import UserError, did_you_mean

Place = Literal["device", "offload", "remat"]

QKV = ("query_proj", "key_proj", "value_proj")
MLP_IN = ("mlpwi_0", "mlpwi_1")
TENSORS = (
    "decoder_layer_input", "query_wa_proj", "kv_wa_proj", *QKV, "context", "out_proj", *MLP_IN, "mlpwo"
)  # fmt: skip
ALIASES = {"qkv_proj": QKV, "mlpwi": MLP_IN, "mla_q": ("query_proj",), "mla_kv": ("key_proj", "value_proj")}
DOTS = ("query_wa_proj", "kv_wa_proj", *QKV, "out_proj")


@dataclass(frozen=True)
class RematPolicy:
    """``saved`` stay in device memory, ``offloaded`` go to the host and back; everything else is
    recomputed."""

    name: str
    saved: frozenset[str] = frozenset({"decoder_layer_input"})
    offloaded: frozenset[str] = frozenset()

    def kept(self, tensor: str) -> bool:
        plain = plain_name(tensor)
        return self.name == "none" or plain in self.saved or plain in self.offloaded


def _keep(*names: str) -> frozenset[str]:
    return frozenset({"decoder_layer_input", *names})


POLICIES = {
    p.name: p
    for p in (
        RematPolicy("full"),
        RematPolicy("save_qkv_proj", _keep(*QKV)),
        RematPolicy("save_out_proj", _keep("out_proj")),
        RematPolicy("save_dot_except_mlp", _keep(*DOTS)),
        RematPolicy("save_dot_except_mlpwi", _keep(*DOTS, "mlpwo")),
        RematPolicy("save_dot_with_context_except_mlp", _keep(*DOTS, "context")),
        RematPolicy("minimal", _keep(*DOTS, *MLP_IN, "mlpwo")),
        RematPolicy("minimal_with_context", _keep(*DOTS, "context", *MLP_IN, "mlpwo")),
        RematPolicy("qkv_proj_offloaded", _keep(), frozenset(QKV)),
        RematPolicy("minimal_offloaded", _keep(), frozenset({*DOTS, *MLP_IN, "mlpwo"})),
        RematPolicy("none", frozenset(TENSORS)),
    )
}


def policy(name: str) -> RematPolicy:
    """The policy called ``name``. Raises UserError for an unknown one."""
    if name not in POLICIES:
        raise UserError(
            f"unknown remat_policy '{name}'.{did_you_mean(name, POLICIES)}"
            f" Known: {', '.join(POLICIES)}, custom."
        )
    return POLICIES[name]


def custom(places: Mapping[str, str]) -> RematPolicy:
    """A policy from tensor -> device | offload | remat. Tensors not named are recomputed, except the layer's
    input, which stays on the device. Raises UserError for an unknown tensor or place, and a tensor with
    two places."""
    wanted: dict[str, str] = {}
    for given, place in places.items():
        name = plain_name(given)
        if name not in TENSORS and name not in ALIASES:
            known = [*TENSORS, *ALIASES]
            raise UserError(f"unknown tensor '{name}' in a custom remat policy.{did_you_mean(name, known)}")
        if place not in ("device", "offload", "remat"):
            raise UserError(f"{name} = '{place}': expected device, offload or remat.")
        if (name, place) == ("decoder_layer_input", "remat"):
            raise UserError(
                "decoder_layer_input = 'remat': a layer is recomputed from its input; use device or offload."
            )
        for tensor in ALIASES.get(name, (name,)):
            if wanted.setdefault(tensor, place) != place:
                raise UserError(
                    f"remat_tensors gives {tensor} two places, {wanted[tensor]} and {place}; name it once, alone or in"
                    " a name that stands for several."
                )
    wanted = {"decoder_layer_input": "device"} | wanted
    saved, offloaded = (
        frozenset(tensor for tensor, place in wanted.items() if place == where)
        for where in ("device", "offload")
    )
    return RematPolicy("custom", saved, offloaded)


def chosen(name: str, places: Mapping[str, str]) -> RematPolicy:
    """The policy that a run's keys ask for: ``name``, with ``places`` of tensors where it is custom.

    Raises UserError for an unknown policy or tensor, and for places that the policy would not use.
    """
    if name == "custom" and not places:
        raise UserError(
            'remat_policy = custom needs remat_tensors, such as remat_tensors={context="device"}.'
        )
    if name != "custom" and places:
        raise UserError(f"remat_tensors has no effect with remat_policy = {name}; set remat_policy=custom.")
    return custom(places) if name == "custom" else policy(name)


def keys(policy: RematPolicy) -> tuple[str, dict[str, Place]]:
    """The (name, places) that make `chosen` give ``policy`` again."""
    if policy == POLICIES.get(policy.name):
        return policy.name, {}
    places: dict[str, Place] = {tensor: "device" for tensor in TENSORS if tensor in policy.saved}
    return "custom", places | {tensor: "offload" for tensor in TENSORS if tensor in policy.offloaded}


def plain_name(tensor: str) -> str:
    """``moe_mlpwi_0`` and ``shared_mlpwi_0`` are kept where ``mlpwi_0`` is."""
    return tensor.removeprefix("moe_").removeprefix("shared_")


def tensor_widths(layer: Layer) -> dict[str, tuple[float, bool]]:
    """Named activations that a backward pass needs: (elements per token, whether the tensor axis shards
    it).

    Projections are sharded by heads or hidden dim, the residual stream by its embedding dim; latents of MLA
    are not.
    """
    widths: dict[str, tuple[float, bool]] = {
        "decoder_layer_input": (layer.d_model, True),
        "context": (layer.attention.context_width, True),
    }
    for m in layer.matmuls:
        if m.name != "router" and not _unneeded(layer, m.name):
            widths[m.name] = (m.d_out * m.active, m.sharding != "replicated")
    return widths


def recomputed(layer: Layer, policy: RematPolicy) -> frozenset[str]:
    """Names of the matmuls (and ``context`` for the attention kernel) that run again in the backward pass."""
    if policy.name == "none":
        return frozenset()
    again = {m.name for m in layer.matmuls if not policy.kept(m.name) and not _unneeded(layer, m.name)}
    if not policy.kept("context"):
        again.add("context")
    return frozenset(again)


def _unneeded(layer: Layer, name: str) -> bool:
    """Nothing in the layer's own backward pass reads the output of the last matrix of a dense MLP, unless a
    norm follows it. A routed MLP's is read by the gradient of the router's weights."""
    return name in ("mlpwo", "shared_mlpwo") and not layer.post_norms
