"""The compiler as judge of kernels, with a compiler whose answers are known."""

import pytest

from slicewise.catalog import slices
from slicewise.compile.bundles import Region
from slicewise.compile.kernels import Compiled as OfKernel
from slicewise.kernels.grouped_matmul import tiles
from slicewise.tune.compiled import Compiled
from slicewise.tune.kept import Kept
from slicewise.tune.problems import Problem

REGIONS = Region(2000, (Region(1200, ()), Region(300, ())))
REFUSAL = (
    "exceeds VMEM: E1001: Scoped allocation with size 40.10M and limit 32.00M exceeded scoped vmem limit"
)


class Compiler:
    def __init__(self, refused):
        self.asked, self.refused = [], refused

    def compile(self, key, values, part):
        self.asked.append(values["columns"])
        return OfKernel(None, self.refused) if values["columns"] > 2048 else OfKernel(REGIONS)


@pytest.fixture(autouse=True)
def own_table(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tried(refused, *columns):
    key = tiles.key("gmm", "v6e", 65536, 8192, 16384, 8, "bfloat16", 0)
    every = tuple({"rows": 512, "summed": 512, "columns": c} for c in columns)
    problem, compiler = Problem(key, "", tiles.NAMES, every), Compiler(refused)
    judge = Compiled(slices.cluster("v6e:2x2", 1), compiler, Kept("compiled"))
    return [judge.kernel(problem, values, 0.0) for values in every], compiler.asked


def test_tiles_that_take_more_vmem_than_one_that_was_refused_are_not_compiled():
    found, asked = tried("exceeds VMEM: E1001", 8192, 16384, 1024)
    assert asked == [8192, 1024]
    assert found[1] == (None, "exceeds VMEM: so does a smaller tile")
    assert found[2][0] > 0


def test_the_limit_that_a_refusal_names_refuses_smaller_tiles_too():
    assert tried(REFUSAL, 8192, 7168, 4096, 1024)[1] == [8192, 4096, 1024]


def test_the_least_time_is_below_that_of_any_listing():
    key = tiles.key("tgmm", "v6e", 65536, 8192, 16384, 8, "bfloat16", 0)
    values = {"rows": 512, "summed": 512, "columns": 1024}
    problem = Problem(key, "", tiles.NAMES, (values,))
    judge = Compiled(slices.cluster("v6e:2x2", 1), Compiler(""), Kept("compiled"))
    assert 0 < judge.least_s(problem, values) < judge.kernel(problem, values, 0.0)[0]
