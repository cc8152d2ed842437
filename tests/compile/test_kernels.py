"""What the compiler's listing of a kernel says, and what a call then takes; one kernel is really compiled."""

import importlib.util
import os
import signal
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.compile import bundles, kernels
from slicewise.compile.bundles import Region
from slicewise.compile.compiler import CompileFailed
from slicewise.errors import ExitCode, UserError
from slicewise.kernels.attention import tiles
from slicewise.kernels.grouped_matmul import tiles as matmul_tiles

LISTING = """
= control target key start
LH: loop header
     0   :  { %s0 = smov 0 } /* Start region 1 */
  0x10 LB: > { %s1 = sld } /* Start region 2 :: Start region 3 */
  0x30   : > { nop } /* Start region 4 */
  0x8f   : > { %v1 = vld } /* End region 4 */
  0x90 PF: > { %p1 = scmp } /* Start/End empty region 5 :: Start region 6 */
 0x12f   : > { %v2 = vst } /* End region 6 :: Start region 7 */
 0x131   : > { nop } /* End region 7 */
 0x140   : > { sbr } /* End region 3 :: End region 2 */
 0x150   :  {} /* End region 1 */
"""


def test_regions_are_a_tree_with_their_bundles():
    whole = bundles.parse(LISTING)
    assert whole.bundles == 0x151
    assert [r.bundles for r in whole.branches] == [0x8F - 0x30, 0x12F - 0x90]


def test_a_listing_without_bundles_is_no_listing():
    with pytest.raises(ValueError, match="no bundles"):
        bundles.parse("nothing here")


@given(
    tokens=st.integers(1, 12),
    q=st.sampled_from([1, 2, 4]),
    kv=st.sampled_from([1, 2, 4]),
    window=st.integers(0, 12),
)
def test_blocks_are_those_of_the_mask(tokens, q, kv, window):
    tokens *= 4
    whole = crossed = 0
    for i in range(0, tokens, q):
        for j in range(0, tokens, kv):
            seen = [
                b <= a and (not window or b > a - window) for a in range(i, i + q) for b in range(j, j + kv)
            ]
            whole, crossed = whole + all(seen), crossed + (any(seen) and not all(seen))
    assert kernels.blocks(tokens, q, kv, window) == (whole, crossed)


def splash(**shape):
    given = {"tokens": 8192, "qk": 128, "v": 128, "window": 0} | shape
    k = tiles.key("tpu7x", given["tokens"], given["qk"], given["v"], given["window"] or None)
    return k, tiles.values(tiles.tiles("tpu7x", given["tokens"], 128))


REGIONS = Region(7000, (Region(3000, ()), Region(3400, ())))


def test_attention_takes_longer_the_more_it_sees():
    times = []
    for shape in ({"tokens": 4096}, {"window": 1024}, {}, {"tokens": 16384}):
        k, values = splash(**shape)
        times.append(kernels.call_seconds(k, values, "forward", REGIONS))
    assert times == sorted(times)
    assert times[3] == pytest.approx(4 * times[2], rel=0.15)


def test_attention_is_never_faster_than_its_products():
    k, values = splash()
    quick = kernels.call_seconds(k, values, "forward", Region(3, (Region(1, ()), Region(1, ()))))
    assert quick > 8192 * 8192 / 2 * 4 * 128 / 1.2e15


def grouped(dtype="bfloat16", **tile):
    k = matmul_tiles.key("gmm", "tpu7x", 16384, 4096, 14336, 8, dtype, 0)
    values = {"rows": 512, "summed": 1024, "columns": 1024} | tile
    return kernels.call_seconds(k, values, "", Region(2000, (Region(1200, ()), Region(300, ()))))


def test_small_tiles_of_a_grouped_product_cost_steps_and_8_bits_save_time():
    assert grouped(rows=128) > 1.5 * grouped()
    assert grouped() > 2 * 16384 * 4096 * 14336 / 1.2e15
    assert grouped("float8_e4m3fn") < grouped()


def test_a_kernel_is_compiled_at_the_size_of_a_few_tiles():
    k, values = splash(window=4096)
    assert kernels.small(k, values).shape == {"tokens": 2048, "qk": 128, "v": 128, "window": 2048}
    k = matmul_tiles.key("tgmm", "v6e", 1 << 17, 4096, 14336, 8, "bfloat16", 0)
    values = {"rows": 256, "summed": 1024, "columns": 3072}
    assert kernels.small(k, values).shape == {"rows": 1024, "summed": 2048, "columns": 14336, "groups": 2}


def test_a_kernel_is_compiled_once_for_all_shapes_that_are_alike_at_that_size(monkeypatch):
    asked = []
    monkeypatch.setattr(
        kernels.KernelCompiler, "_compile", lambda self, *request: asked.append(request) or len(asked)
    )
    values = {"rows": 512, "summed": 1024, "columns": 512}
    with kernels.KernelCompiler("v6e") as compiler:
        for summed, groups in ((4096, 8), (14336, 8), (14336, 64), (1024, 8)):
            k = matmul_tiles.key("gmm", "v6e", 65536, summed, 4096, groups, "bfloat16", 0)
            compiler.compile(k, values, "")
        compiler.compile(k, values | {"rows": 256}, "")
    assert len(asked) == 3  # one tile of summed columns is another kernel than several


def test_a_matrix_that_is_summed_in_one_step_is_fetched_once_for_its_group():
    def per_flop(summed):
        k = matmul_tiles.key("gmm", "v6e", 65536, summed, 4096, 8, "bfloat16", 0)
        values = {"rows": 128, "summed": 1024, "columns": 512}
        return kernels.call_seconds(k, values, "", Region(20, (Region(12, ()), Region(3, ())))) / summed

    assert per_flop(1024) < 0.5 * per_flop(2048)


def test_a_chip_without_a_compiler_is_refused():
    with pytest.raises(UserError, match="no compiler here makes programs for h100"):
        kernels.KernelCompiler("h100")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """One whose process is a shell script; with the means to compile one kernel."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    key = matmul_tiles.key("gmm", "v6e", 4096, 1024, 1024, 4, "bfloat16", 0)

    def with_script(script):
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(kernels, "sys", types.SimpleNamespace(executable=str(path)))
        made = kernels.KernelCompiler("v6e")

        def compile(rows=512, timeout_s=30.0):
            values = {"rows": rows, "summed": 1024, "columns": 1024}
            return made.compile(key, values, "", timeout_s=timeout_s)

        return made, compile

    return with_script


HARMLESS = "echo 'Failed to find host bounds for accelerator type: x' >&2"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"{HARMLESS}; read l; kill -9 $$", "(SIGKILL, as where the machine has no memory left)."),
        (f"{HARMLESS}; kill -9 $$", "(SIGKILL, as where the machine has no memory left)."),
        (f"echo 'F1130 Check failed: a' >&2; {HARMLESS}; kill -6 $$", "(SIGABRT: F1130 Check failed: a)."),
        ("read l; printf '{'; kill -15 $$", "(SIGTERM)."),
        ("echo ModuleNotFoundError >&2; exit 1", "(exit code 1: ModuleNotFoundError)."),
        ("exit 3", "(exit code 3: it printed nothing)."),
    ],
)
def test_how_a_compiler_ended_is_said_and_no_harmless_line_of_its_log(compiler, script, said):
    made, compile = compiler(script)
    with made, pytest.raises(CompileFailed) as failed:
        compile()
    assert str(failed.value) == f"the compiler crashed on a kernel {said}"
    assert failed.value.code == ExitCode.INTERNAL


def test_a_compiler_that_takes_too_long_is_ended(compiler):
    made, compile = compiler("exec sleep 60")
    with made, pytest.raises(CompileFailed, match="a kernel took longer than 0 s to compile"):
        compile(timeout_s=0.05)
    assert made.process is None


def test_a_compiler_that_was_killed_between_kernels_is_started_again(compiler):
    made, compile = compiler('while read l; do echo \'{"error": "vmem: too much"}\'; done')
    with made:
        assert compile(512).problem == "exceeds VMEM: vmem: too much"
        first = made.process
        os.kill(first.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        assert compile(256).problem == "exceeds VMEM: vmem: too much"
        assert made.process is not first
    assert not made.folder.exists()


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here")
def test_the_compiler_says_how_many_bundles_a_kernel_has_and_what_exceeds_vmem():
    k = matmul_tiles.key("gmm", "v6e", 4096, 1024, 1024, 4, "bfloat16", 0)
    with kernels.KernelCompiler("v6e") as compiler:
        fits = compiler.compile(k, {"rows": 512, "summed": 1024, "columns": 1024}, "")
        over = compiler.compile(k, {"rows": 1024, "summed": 1024, "columns": 1024}, "")
    assert fits.regions is not None
    seconds = kernels.call_seconds(k, {"rows": 512, "summed": 1024, "columns": 1024}, "", fits.regions)
    assert 2 * 4096 * 1024 * 1024 / 9.2e14 < seconds < 1e-3
    assert over.regions is not None or "VMEM" in over.problem
