"""Runs over a pipeline: the losses of one device, checkpoints for any number of stages, and what is refused."""

import shutil

import jax
import numpy as np
import pytest

from slicewise.catalog import model
from slicewise.compile.programs import build_program
from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.train.restore import open_trained
from slicewise.train.step import build_train_step

RUN = ["steps=4", "checkpoint_every=2"]
STAGES = ["ici_pipeline_parallelism=2", "ici_fsdp_parallelism=2", "pipeline_repeats=2"]


@pytest.fixture
def deeper(tmp_path):
    """demo-tiny with a layer for each round of each stage."""
    spec = model.load("demo-tiny").model_dump(exclude_defaults=True) | {"layers": 4}
    path = tmp_path / "deeper.toml"
    path.write_text(
        "".join(f"{key} = {str(v).lower() if v is True else repr(v)}\n" for key, v in spec.items())
    )
    return f"model={path}"


def test_a_run_over_stages_has_the_losses_of_one_device_and_goes_on_on_one(trainer, deeper):
    trainer.use_devices(4)
    over_stages = [record["loss"] for record in trainer.train(*RUN, *STAGES, deeper)]
    opened = open_trained(str(trainer.folder / "run"), [])
    assert opened.number == 4
    assert opened.mesh.shape["data"] == 4
    shutil.rmtree(trainer.folder / "run" / "checkpoints" / "4")

    trainer.use_devices(1)
    resumed = [record["loss"] for record in trainer.train(*RUN, deeper)]
    assert resumed[:2] == over_stages[:2]
    np.testing.assert_allclose(resumed[2:], over_stages[2:], rtol=1e-5)
    trainer.train(*RUN, deeper, "run_name=alone")
    alone = [record["loss"] for record in trainer.records("alone")]
    np.testing.assert_allclose(over_stages, alone, rtol=1e-5)


def built(*overrides):
    overrides = ["model=demo-tiny", "ici_pipeline_parallelism=2", "ici_fsdp_parallelism=2", *overrides]
    config = load_config(None, overrides).config
    return config, build_mesh(config, by_slice(jax.devices()[:4]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["pipeline_repeats=2"],
            "2 x pipeline_repeats 2 = 4 does not divide the 2 equal layers of demo-tiny",
        ),
        (
            ["pipeline_microbatches=16"],
            "pipeline_microbatches = 16 has less than one sequence in a microbatch",
        ),
        (["pipeline_microbatches=3"], "pipeline_microbatches = 3 does not fit: .* one of 2, 4, 8"),
        (["global_batch_size=6"], "global_batch_size = 6 is not a multiple of data x pipeline x fsdp .* = 4"),
        (
            ["gradient_accumulation_steps=8"],
            "gradient_accumulation_steps = 8 does not divide the 4 sequences",
        ),
        (
            ["ici_pipeline_parallelism=4", "ici_fsdp_parallelism=1"],
            "parallelism 4 does not divide the 2 equal",
        ),
        (
            ["ici_pipeline_parallelism=1", "ici_fsdp_parallelism=4", "pipeline_repeats=2"],
            "= 2 needs a pipeline",
        ),
        (["remat_policy=qkv_proj_offloaded"], "pipeline = 2 does not go with .*query_proj.* on the host"),
    ],
)
def test_what_does_not_divide_is_refused_before_anything_is_compiled(overrides, message):
    with pytest.raises(UserError, match=message):
        build_train_step(*built(*overrides))


def test_a_microbatch_below_one_is_refused_as_it_is_read():
    with pytest.raises(
        UserError, match="pipeline_microbatches = -1: input should be greater than or equal to 0"
    ):
        load_config(None, ["pipeline_microbatches=-1"])


def test_generation_is_not_compiled_over_stages():
    with pytest.raises(UserError, match="the program decode does not run over a pipeline"):
        build_program("decode", *built())
