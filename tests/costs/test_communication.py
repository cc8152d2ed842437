"""The list of a step's collectives is what its price is made of."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.catalog import model, slices
from slicewise.costs.communication import priced_collectives, step_moves
from slicewise.costs.layout import Degrees, Layout, Recipe
from slicewise.costs.network import Move
from slicewise.costs.remat import POLICIES
from slicewise.costs.shapes import model_shape
from slicewise.costs.step import estimate, network

SHAPES = {name: model_shape(model.load(name)) for name in ("llama3-8b", "mixtral-8x7b", "deepseek-v2-lite")}
CLUSTER = slices.cluster("v5p:4x4x4", 2)
MESHES = [  # degrees over ICI, over DCN
    ({"fsdp": 64}, {"data": 2}),
    ({"data": 4, "fsdp": 16}, {"fsdp": 2}),
    ({"fsdp": 16, "tensor": 4}, {"data": 2}),
    ({"fsdp": 8, "context": 8}, {"data": 2}),
    ({"fsdp": 8, "expert": 8}, {"fsdp": 2}),
    ({"data": 2, "expert": 8, "tensor": 4}, {"data": 2}),
    ({"fsdp": 16, "pipeline": 4}, {"data": 2}),
    ({"fsdp": 64}, {"pipeline": 2}),
]


@given(
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(MESHES),
    st.sampled_from(["full", "minimal", "save_out_proj"]),
    st.sampled_from(["all_gather", "ring", "ulysses"]),
    st.sampled_from([1, 4]),
    st.booleans(),
)
@settings(max_examples=40)
def test_its_seconds_are_those_of_the_estimate(name, mesh, policy, exchange, steps, once):
    ici, dcn = mesh
    layout = Layout(
        Degrees(**ici), Degrees(**dcn), 4096, steps, 4 if "pipeline" in {**ici, **dcn} else 1, 1, once
    )
    recipe = Recipe(POLICIES[policy], context_exchange=exchange)
    net = network(CLUSTER, layout)
    sums: dict[str, float] = {}
    for move, times in step_moves(SHAPES[name], layout, recipe, 4096):
        sums[move.axis] = sums.get(move.axis, 0.0) + float(times * move.seconds(net))
    priced = estimate(SHAPES[name], CLUSTER, layout, recipe, 4096).communication_s
    assert {axis: s for axis, s in sums.items() if s} == pytest.approx(priced)


def test_only_axes_that_divide_something_communicate():
    layout = Layout(Degrees(fsdp=64), Degrees(data=2), 128)
    found = priced_collectives(SHAPES["llama3-8b"], layout, Recipe(), 4096)
    assert {(p.op, p.network, *p.axes) for p in found} == {
        ("all-gather", "ici", "fsdp"),
        ("reduce-scatter", "ici", "fsdp"),
        ("all-reduce", "dcn", "data"),
    }
    gathered = next(p for p in found if p.op == "all-gather")
    shape = SHAPES["llama3-8b"]
    matrices = 2 * 2 * (shape.parameters - shape.embedding_parameters) + 2 * shape.embedding_parameters
    assert gathered.sent_bytes == pytest.approx(63 / 64 * matrices, rel=1e-4)


@pytest.mark.parametrize(
    ("op", "sent"),
    [
        ("all-gather", 30.0),
        ("reduce-scatter", 30.0),
        ("all-reduce", 60.0),
        ("all-to-all", 7.5),
        ("collective-permute", 40.0),
    ],
)
def test_what_a_device_sends(op, sent):
    assert Move(op, "fsdp", {"fsdp": 4}, 40.0).sent_bytes == sent
    assert not np.any(Move(op, "fsdp", {"fsdp": 1}, 40.0).sent_bytes)
