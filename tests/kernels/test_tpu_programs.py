"""Steps for TPUs that are not there: the chosen kernels are in the program, and run no more than they must."""

import re
from collections import Counter

import jax
import pytest

pytest.importorskip("libtpu")

from jax.experimental import topologies

from slicewise.catalog import slices
from slicewise.compile import hlo
from slicewise.compile.compiler import Request, compile_request
from slicewise.compile.cost import precision
from slicewise.config import load_config
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.train import choices
from slicewise.train.step import build_train_step

pytestmark = pytest.mark.aot

SMALL = ["sequence_length=256", "global_batch_size=8"]


@pytest.fixture(autouse=True)
def no_tpu(monkeypatch):
    """The compiler asks no metadata server, and lets other processes use it too."""
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "x",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        monkeypatch.setenv(name, value)


def lowered(topology: str, *overrides: str) -> jax.stages.Lowered:
    config = load_config(None, [*SMALL, *overrides]).config
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = build_mesh(config, by_slice(devices))
    step = build_train_step(config, mesh)
    with jax.set_mesh(mesh):
        program = step.update.lower(step.abstract_state, step.abstract_batch)
    choices.check_kernels(choices.expected_kernels(config, step.spec, mesh), program.as_text())
    return program


def kernels(program: jax.stages.Lowered) -> Counter:
    return Counter(re.findall(r'kernel_name = "(\w+)"', program.as_text()))


WINDOWS = """
name = "windows"
source = "this test"
layers = 4
d_model = 128
heads = 4
kv_heads = 2
head_dim = 32
d_ff = 256
vocab = 256
sliding_window = 100
global_every = 2
attention_sinks = true
"""


@pytest.mark.parametrize(("policy", "times"), [("minimal_with_context", 1), ("minimal", 2)])
def test_a_kept_context_spares_the_backward_pass_the_forward_kernel(policy, times, tmp_path):
    """Of layers with and without a window, one kernel each."""
    model = tmp_path / "windows.toml"
    model.write_text(WINDOWS)
    found = kernels(
        lowered("v6e:2x2", f"model={model}", f"remat_policy={policy}", "ici_tensor_parallelism=2")
    )
    assert found == {
        "splash_mha_fwd_segmented_residuals": 2 * times,
        "splash_mha_dkv_segmented_no_residuals": 2,
    }


def scheduled(slice_: str, *overrides: str) -> str:
    """The instructions of a step, in the order and with the kernels that machine code is made from."""
    config = load_config(None, [*SMALL, *overrides]).config
    return compile_request(Request(config, slices.cluster(slice_))).text("scheduled.hlo")


def calls(text: str) -> Counter:
    return Counter(
        re.findall(r'%(splash_mha_[a-z]+|pallas_tpu_ragged_dot_t?gmm)\S* = .*"tpu_custom_call"', text)
    )


def products(text: str) -> Counter:
    """Matrix products by the unit that they use."""
    module = hlo.parse(text)
    found = (
        precision(*(c.shape_of(name)[0] for name in i.operands[:2]))
        for c in module.computations.values()
        for i in c.instructions.values()
        if i.opcode in ("convolution", "dot")
    )
    return Counter(found)


def test_the_compiled_step_multiplies_and_gathers_in_fp8_and_calls_the_kernels_of_experts(program_cache):
    flags = "compiler_flags=sparsecore-all-gather,sparsecore-reduce-scatter,layer-scheduler,native-bf16"
    text = scheduled("tpu7x:2x2x1", "model=demo-moe", "quantization=fp8", flags)
    found = calls(text)
    assert found["splash_mha_fwd"] >= 1
    assert found["splash_mha_dkv"] >= 1
    assert found["pallas_tpu_ragged_dot_gmm"] >= 6  # three forward, and as many for the gradients of rows
    assert found["pallas_tpu_ragged_dot_tgmm"] >= 3
    # The four of attention, forward and twice backward; the router and the output stay as they are.
    assert products(text)["fp8"] >= 12
    gathered = Counter(re.findall(r"= \(?(\w+)\[\S* all-gather", text))
    assert gathered["f8e4m3fn"] >= 8
    assert "f8e5m2[" in text


@pytest.mark.parametrize(
    ("strategy", "ways", "calls", "collectives"),
    [
        # The kernel of a window runs beside that without, and forward again in the backward pass.
        ("all_gather", 2, {"fwd": 4, "dkv": 2}, {"all_gather", "reduce_scatter"}),
        ("ulysses", 2, {"fwd": 4, "dkv": 2}, {"all_to_all"}),
        # Each chunk with itself, late with early ones, then two pairs in the loop of rounds and in the last one.
        ("ring", 4, {"fwd": 4 * 7, "dkv": 2 * 7}, {"collective_permute"}),
    ],
)
def test_divided_rows_call_the_kernel(strategy, ways, calls, collectives, tmp_path):
    model = tmp_path / "windows.toml"
    model.write_text(WINDOWS)
    context = [f"context_strategy={strategy}", f"ici_context_parallelism={ways}", "sequence_length=1024"]
    program = lowered("v5p:2x2x1", f"model={model}", "global_batch_size=2", *context)
    found = kernels(program)
    assert {re.search("_(fwd|dkv)_", name)[1]: n for name, n in found.items()} == calls
    for collective in collectives:
        assert f"stablehlo.{collective}" in program.as_text(), collective
