import re
import typing

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

from slicewise.catalog.model import load
from slicewise.config import Model, describe, load_config
from slicewise.costs.remat import POLICIES, TENSORS, chosen, custom, plain_name, tensor_widths
from slicewise.costs.shapes import model_shape
from slicewise.errors import UserError
from slicewise.kernels.attention.api import Tokens
from slicewise.model import transformer
from slicewise.model.remat import checkpoint_policy, named
from slicewise.parallel.rules import partition

EVERY = (*TENSORS, "moe_mlpwi_0", "shared_mlpwo")


def kept(policy, capsys):
    """What a chain of every named tensor keeps: names on the device, and how many on the host."""

    def chain(x):
        for tensor in EVERY:
            x = named(jnp.sin(x), tensor)
        return jnp.sin(x)

    print_saved_residuals(jax.checkpoint(chain, policy=checkpoint_policy(policy)), jnp.ones(3))
    lines = capsys.readouterr().out.splitlines()
    return {line.split("'")[1] for line in lines if "named" in line}, sum("<host>" in line for line in lines)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "none"])
def test_a_policy_keeps_what_the_planner_prices(name, capsys):
    policy = POLICIES[name]
    offloaded = [tensor for tensor in EVERY if plain_name(tensor) in policy.offloaded]
    here = {tensor for tensor in EVERY if policy.kept(tensor)} - set(offloaded)
    assert kept(policy, capsys) == (here, len(offloaded))


def test_a_custom_policy_keeps_what_it_names(capsys):
    policy = custom({"decoder_layer_input": "offload", "mlpwi_0": "device", "context": "remat"})
    assert kept(policy, capsys) == ({"mlpwi_0", "moe_mlpwi_0"}, 1)


def test_a_run_can_ask_for_every_policy_of_the_planner():
    names = typing.get_args(Model.model_fields["remat_policy"].annotation)
    assert set(names) == {*POLICIES, "custom"}
    for name in POLICIES:
        assert chosen(name, {}).name == name


def test_tensors_are_placed_from_the_command_line_and_shown_as_toml():
    places = 'remat_tensors={context = "device", decoder_layer_input = "offload"}'
    loaded = load_config(None, ["remat_policy=custom", places])
    shown = next(row.value for row in describe(loaded) if row.key == "remat_tensors")
    assert shown == '{"context" = "device", "decoder_layer_input" = "offload"}'
    assert load_config(None, ["remat_policy=custom", f"remat_tensors={shown}"]).config == loaded.config
    policy = chosen(loaded.config.model.remat_policy, loaded.config.model.remat_tensors)
    assert policy.offloaded == {"decoder_layer_input"}


def test_a_place_that_is_none_names_the_tensor():
    with pytest.raises(UserError, match=r"remat_tensors.context = 'disk': .*from command line"):
        load_config(None, ['remat_tensors={context="disk"}'])


@pytest.mark.parametrize("model", ["demo-tiny", "gemma2-2b", "gpt3-175b"])
def test_a_layer_names_each_tensor_that_the_planner_prices(model, one_device):
    """Traced only. The planner leaves out what no backward pass reads."""
    spec = load(model)
    params = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    tokens = jax.sharding.reshard(jnp.zeros((1, 8), jnp.int32), partition("batch", "sequence"))
    run = jax.make_jaxpr(lambda p, t: transformer.forward(p, spec, t, Tokens(t, t), dtype=jnp.bfloat16)[0])
    text = str(run(params, tokens))
    priced = tensor_widths(model_shape(spec).layers[0])
    assert {tensor for tensor in TENSORS if re.search(rf"name={tensor}\b", text)} >= set(priced)
