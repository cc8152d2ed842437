"""The compiler as judge of kernels, with a compiler whose answers are known."""

import time

import pytest

from slicewise.catalog import slices
from slicewise.compile.bundles import Region
from slicewise.compile.compiler import CompileFailed
from slicewise.compile.kernels import Compiled as OfKernel
from slicewise.config import load_config
from slicewise.errors import ExitCode
from slicewise.kernels.grouped_matmul import tiles
from slicewise.tune import compiled
from slicewise.tune.compiled import Compiled
from slicewise.tune.kept import Kept
from slicewise.tune.problems import Problem
from slicewise.tune.search import Accident, OutOfTime

REGIONS = Region(2000, (Region(1200, ()), Region(300, ())))
REFUSAL = (
    "exceeds VMEM: E1001: Scoped allocation with size 40.10M and limit 32.00M exceeded scoped vmem limit"
)


class Compiler:
    def __init__(self, refused):
        self.asked, self.refused = [], refused

    def compile(self, key, values, part, *, timeout_s):
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
    until_s = time.monotonic() + 60
    return [judge.kernel(problem, values, until_s) for values in every], compiler.asked


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


@pytest.mark.parametrize("left_s", [0.05, 60.0])
def test_a_compile_is_stopped_when_the_time_is_over_and_says_nothing_of_its_tile(left_s):
    key = tiles.key("gmm", "v6e", 65536, 8192, 16384, 8, "bfloat16", 0)
    values = {"rows": 512, "summed": 512, "columns": 1024}
    problem, kept = Problem(key, "", tiles.NAMES, (values,)), Kept("compiled")

    class Slow:
        def compile(self, key, values, part, *, timeout_s):
            assert timeout_s <= left_s
            time.sleep(min(timeout_s, 0.1))
            raise CompileFailed("a kernel took longer than that to compile", code=ExitCode.INTERNAL)

    judge = Compiled(slices.cluster("v6e:2x2", 1), Slow(), kept)
    if left_s < 1:
        with pytest.raises(OutOfTime):
            judge.kernel(problem, values, time.monotonic() + left_s)
    else:
        with pytest.raises(Accident, match="a kernel took longer than that"):
            judge.kernel(problem, values, time.monotonic() + left_s)
    assert kept.get(problem, values) is Kept("compiled").get(problem, values) is None


def test_a_refusal_of_the_compiler_is_kept_and_a_crash_is_not():
    key = tiles.key("gmm", "v6e", 65536, 8192, 16384, 8, "bfloat16", 0)
    values = {"rows": 512, "summed": 512, "columns": 1024}
    problem, answers = Problem(key, "", tiles.NAMES, (values,)), []

    class Answering:
        def compile(self, key, values, part, *, timeout_s):
            answer = answers.pop()
            if isinstance(answer, Exception):
                raise answer
            return answer

    judge = Compiled(slices.cluster("v6e:2x2", 1), Answering(), Kept("compiled"))
    until_s = time.monotonic() + 60
    answers.append(CompileFailed("the compiler crashed on a kernel (SIGKILL).", code=ExitCode.INTERNAL))
    with pytest.raises(Accident, match="SIGKILL"):
        judge.kernel(problem, values, until_s)
    answers.append(OfKernel(None, REFUSAL))
    assert judge.kernel(problem, values, until_s) == (None, REFUSAL)  # it was asked again
    assert Kept("compiled").get(problem, values) == (None, REFUSAL)


@pytest.mark.parametrize("left_s", [0.05, 60.0])
def test_the_log_of_a_step_stays_only_where_its_message_is_shown(left_s, tmp_path, monkeypatch):
    folder = tmp_path / "programs" / "a.1.2"
    folder.mkdir(parents=True)

    def compile_request(request, *, timeout_s):
        time.sleep(min(timeout_s, 0.1))
        stopped = CompileFailed("the compiler was stopped", code=ExitCode.INTERNAL)
        stopped.left = folder
        raise stopped

    monkeypatch.setattr(compiled, "compile_request", compile_request)
    judge = Compiled(slices.cluster("v6e:2x2", 1), Compiler(""), Kept("compiled"))
    config, until_s = load_config(None, []).config, time.monotonic() + left_s
    if left_s < 1:
        with pytest.raises(OutOfTime):
            judge.step(config, until_s)
    else:
        with pytest.raises(Accident, match="the compiler was stopped"):
            judge.step(config, until_s)
    assert folder.exists() == (left_s > 1)
