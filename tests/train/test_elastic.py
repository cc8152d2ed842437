"""What a run becomes on fewer slices, and the order of its data then."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.train.elastic import fit, sizes
from slicewise.train.turns import Turns


def config(*overrides):
    return load_config(None, ["dataset=synthetic", *overrides]).config


def on(config, slices, whole=2, devices=2):
    return fit(config, num_slices=slices, devices_per_slice=devices, all_slices=whole)


def test_a_run_on_all_its_slices_is_what_was_asked_for():
    asked = config("global_batch_size=8", "gradient_accumulation_steps=2")
    assert on(asked, 2).config == asked
    assert on(asked, 2).turns == 1


@pytest.mark.parametrize(
    ("overrides", "whole", "slices", "data", "fsdp", "parts"),
    [
        ((), 2, 1, 1, 1, 2),
        (("gradient_accumulation_steps=2",), 2, 1, 1, 1, 4),
        (("global_batch_size=24",), 3, 2, 2, 1, 2),  # 1.5 rounded up: no more at once than before
        (("dcn_data_parallelism=4", "global_batch_size=16"), 4, 1, 1, 1, 4),
        (("dcn_data_parallelism=1", "dcn_fsdp_parallelism=-1"), 2, 1, 1, 1, 2),
        (("dcn_data_parallelism=2", "dcn_fsdp_parallelism=2"), 4, 2, 1, 2, 2),
        (("gradient_accumulation_steps=4",), 2, 1, 1, 1, 8),  # one sequence at a time is the least
    ],
)
def test_fewer_slices_take_the_same_batch_in_more_parts(overrides, whole, slices, data, fsdp, parts):
    fitted = on(config("global_batch_size=16", *overrides), slices, whole)
    parallelism = fitted.config.parallelism
    assert (parallelism.dcn_data_parallelism, parallelism.dcn_fsdp_parallelism) == (data, fsdp)
    assert fitted.config.optimizer.gradient_accumulation_steps == parts
    assert fitted.config.data == fitted.asked.data
    assert fitted.turns == 1


def test_elastic_batch_takes_the_largest_part_of_the_batch_that_divides_it():
    smaller = lambda whole, slices: on(config("elastic=batch", "global_batch_size=24"), slices, whole)  # noqa: E731
    assert smaller(2, 1).config.data.global_batch_size == 12
    assert smaller(2, 1).config.optimizer.gradient_accumulation_steps == 1
    assert smaller(3, 2).config.data.global_batch_size == 12  # 16 does not divide 24
    assert smaller(3, 1).turns == 3


@pytest.mark.parametrize(
    ("overrides", "whole", "slices", "said"),
    [
        (("dcn_data_parallelism=3",), 3, 2, "global_batch_size = 16 is not a multiple of the 4 data shards") ,
        (("dcn_data_parallelism=1", "dcn_tensor_parallelism=2"), 2, 1, "dcn_tensor_parallelism=2 cannot shrink"),
        (("elastic=batch", "gradient_accumulation_steps=8"), 2, 1, "finds no smaller batch for 1 of 2 slices"),
    ],
)  # fmt: skip
def test_what_cannot_run_on_fewer_slices_is_refused_with_the_key_to_change(overrides, whole, slices, said):
    rows = "global_batch_size=18" if whole == 3 else "global_batch_size=16"
    said = said.replace("= 16", "= 18") if whole == 3 else said
    with pytest.raises(UserError, match=said):
        on(config(rows, *overrides), slices, whole)


def test_a_job_knows_with_which_numbers_of_slices_it_may_go_on():
    known = lambda *keys: sizes(config("global_batch_size=16", *keys), all_slices=4, devices_per_slice=2)  # noqa: E731
    assert known() == ()
    assert known("elastic=accumulate") == (2, 1)  # 3 slices of 2 devices do not divide 16 sequences
    assert known("elastic=accumulate", "min_slices=2") == (2,)
    with pytest.raises(UserError, match="min_slices = 5 is more than the 4 slices"):
        known("elastic=accumulate", "min_slices=5")
    with pytest.raises(UserError, match="is not a multiple of the 6 data shards"):
        known("elastic=accumulate", "min_slices=3")


@given(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_over_any_changes_of_size_no_row_is_skipped_or_repeated(sizes, seed):
    """Attempts with so many slices each, which take 1 to 3 steps: the rows that steps took are one sequence."""
    random = np.random.default_rng(seed)
    asked = config("global_batch_size=8", "elastic=batch", "sequence_length=4")
    data_state, row, taken = None, 0, []
    for slices in sizes:
        fitted = on(asked, slices, whole=4, devices=1)
        rows = fitted.config.data.global_batch_size
        hosts = [Turns(fitted, places, data_state, row) for places in np.split(np.arange(rows), slices)]
        for _ in range(random.integers(1, 4)):
            taken += [tokens for host in hosts for tokens in next(host)["tokens"]]
        data_state = np.zeros((8, 2), np.int64)
        for host in hosts:
            data_state[host.rows] = host.state
        row = hosts[0].row
        assert {host.row for host in hosts} == {row}
    undisturbed = Turns(on(asked, 4, whole=4, devices=1), range(8), None)
    expected = [tokens for _ in range(-(-len(taken) // 8)) for tokens in next(undisturbed)["tokens"]]
    np.testing.assert_array_equal(taken, expected[: len(taken)])
