import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.costs.collectives import Axis
from slicewise.costs.sharding import Layout, device_bytes, matmul_strategies, replication
from slicewise.errors import UserError

C, LINK = 1.97e14, 4.5e10
ALPHA = C / (2 * LINK)


def strategies(B, D, F, layout, mesh=None, **options):
    mesh = mesh or {"X": (Axis(16),)}
    return matmul_strategies(
        B, D, F, layout, mesh, flops_per_s=C, link_bytes_per_s=LINK, hop_s=0.0, **options
    )


def test_no_contracting_axis_needs_no_communication():
    best = strategies(4096, 8192, 8192, Layout(x_B=("X",), w_F=("Y",)), {"X": (Axis(16),), "Y": (Axis(4),)})[
        0
    ]
    assert best.steps == ()
    assert best.name == "no communication"
    assert best.flops_per_device == 2 * 4096 * 8192 * 8192 / 64


@pytest.mark.parametrize(("y_F", "op"), [((), "all_reduce"), (("X",), "reduce_scatter")])
def test_both_sharded_on_the_contraction_multiply_then_reduce(y_F, op):
    best = strategies(1024, 8192, 32768, Layout(x_D=("X",), w_D=("X",), y_B=(), y_F=y_F))[0]
    assert [(s.op, s.array) for s in best.steps] == [(op, "y")]
    assert best.steps[0].bytes_ == 2 * 1024 * 32768


def test_one_axis_on_both_outer_dims_gathers_the_cheaper_operand():
    layout = Layout(x_B=("X",), w_F=("X",))
    assert strategies(512, 8192, 32768, layout)[0].name == "all-gather x over X"
    assert strategies(1 << 20, 8192, 1024, layout)[0].name == "all-gather w over X"


@given(st.integers(1, 1 << 17), st.integers(1, 64))
def test_sharded_weights_are_gathered_or_multiplied_in_place_as_the_inequalities_say(B, thousands):
    """B < alpha: partial sums win iff D > 2B; B >= alpha: iff D > 2 alpha, for w[D_X, F] and y complete."""
    D = 1024 * thousands
    found = {s.roles: s for s in strategies(B, D, 32768, Layout(w_D=("X",), y_B=(), y_F=()))}
    gather, partial = found[(("X", "none"),)], found[(("X", "D"),)]
    assert [s.op for s in gather.steps] == ["all_gather"]
    assert gather.steps[0].bytes_ == 2 * D * 32768
    assert [s.op for s in partial.steps] == ["all_reduce"]
    assert partial.steps[0].bytes_ == 2 * B * 32768
    threshold = 2 * B if B < ALPHA else 2 * ALPHA
    if abs(D / threshold - 1) > 1e-6 and threshold < 16 * D:
        assert (partial.time.lower_s < gather.time.lower_s) == (threshold < D)


@given(st.integers(1, 1 << 15), st.integers(1, 1 << 15))
def test_gathering_against_scattering_moves_d_over_f(D, F):
    """x[B, D_X] . w[D, F]: gather x, or multiply and scatter y."""
    found = strategies(1024, D, F, Layout(x_D=("X",), y_B=(), y_F=("X",)))
    gather = next(s for s in found if s.roles == (("X", "F"),))
    scatter = next(s for s in found if s.roles == (("X", "D"),))
    assert gather.comms_bytes / scatter.comms_bytes == pytest.approx(D / F)


layouts = st.builds(
    Layout,
    x_B=st.sampled_from([(), ("X",), ("X", "Y")]),
    x_D=st.sampled_from([(), ("Z",)]),
    w_D=st.sampled_from([(), ("X",), ("Z",)]),
    w_F=st.sampled_from([(), ("Y",)]),
    y_B=st.sampled_from([None, (), ("X",), ("Z", "Y")]),
    y_F=st.sampled_from([None, ()]),
)


@settings(max_examples=60)
@given(layouts)
def test_every_strategy_is_consistent_and_sorted(layout):
    mesh = {"X": (Axis(16),), "Y": (Axis(4, wrap=False),), "Z": (Axis(2), Axis(2))}
    found = strategies(4096, 8192, 16384, layout, mesh, all_to_all=True)
    assert len(found) == 4**3
    plain = strategies(4096, 8192, 16384, layout, mesh)
    assert 1 <= len(plain) <= len(found)
    assert found[0].time.lower_s <= plain[0].time.lower_s
    assert [s.time.lower_s for s in found] == sorted(s.time.lower_s for s in found)
    total = 2 * 4096 * 8192 * 16384
    for s in found:
        splits = [a for a, role in s.roles if role != "none"]
        ways = {"X": 16, "Y": 4, "Z": 4}
        shared = 1
        for a in splits:
            shared *= ways[a]
        assert s.flops_per_device * shared == total
        assert all(step.bytes_ > 0 for step in s.steps)


def test_a_gather_of_an_array_also_sharded_elsewhere_moves_its_share():
    mesh = {"X": (Axis(16),), "Y": (Axis(4),)}
    best = strategies(4096, 8192, 8192, Layout(x_B=("X",), w_D=("X",), w_F=("Y",)), mesh)
    gather = next(s for s in best if s.name == "all-gather w over X")
    assert gather.steps[0].bytes_ == 2 * 8192 * 8192 / 4


def test_sums_are_scattered_before_the_rest_is_reduced():
    """Partial sums over X and Y; y is wanted split over X: the all-reduce over Y moves a sixteenth."""
    mesh = {"X": (Axis(16),), "Y": (Axis(4),)}
    layout = Layout(x_D=("X", "Y"), w_D=("X", "Y"), y_B=(), y_F=("X",))
    found = next(
        s for s in strategies(1024, 8192, 32768, layout, mesh) if s.roles == (("X", "D"), ("Y", "D"))
    )
    assert [(s.op, s.axes) for s in found.steps] == [("reduce_scatter", ("X",)), ("all_reduce", ("Y",))]
    assert [s.bytes_ for s in found.steps] == [2 * 1024 * 32768, 2 * 1024 * 32768 / 16]


def test_moving_an_axis_to_another_dim_exchanges_the_shard_of_its_group():
    mesh = {"X": (Axis(16),), "Y": (Axis(4),)}
    layout = Layout(x_D=("X",), w_F=("Y",), y_B=("X",), y_F=("Y",))
    best = strategies(1024, 8192, 32768, layout, mesh, all_to_all=True)[0]
    assert best.name == "all-to-all x over X"
    assert best.steps[0].bytes_ == 2 * 1024 * 8192


def test_unused_axes_hold_copies():
    mesh = {"X": 4, "Y": 8, "Z": 2}
    assert replication(mesh, "X") == 16
    assert device_bytes(1 << 20, mesh, "XY") == (1 << 20) / 32


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(x_B=("X",), x_D=("X",)), "x is sharded twice over 'X'"),
        (Layout(w_D=("Q",)), "w is sharded over 'Q', which is no axis of the mesh"),
    ],
)
def test_an_impossible_layout_is_refused(layout, message):
    with pytest.raises(UserError, match=message):
        strategies(8, 8, 8, layout)
