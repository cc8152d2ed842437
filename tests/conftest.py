"""Every test sees eight CPU devices; the variables must be set before JAX is imported."""

import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Hundreds of processes start: with no bytecode kept, each would compile the sources of JAX and of slicewise anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "64"  # threads enough for the collectives of eight devices: see launch/targets/local.py
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0"  # compiles three times as fast; the arithmetic stays float32
)


# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("any-load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-load")


def pytest_addoption(parser):
    parser.addoption(
        "--every-layout",
        action="store_true",
        help="tests/train/test_layouts.py runs every pairing with all options: an hour",
    )


def pytest_sessionstart():
    """JAX counts its devices once, and tests may change the variables above."""
    import jax

    assert jax.device_count() == 8


def pytest_collection_finish():
    """What is imported by now stays: the garbage collector need not look at it again while programs are traced."""
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Files with slow tests first: where files are shared out among processes, all are busy until the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory):
    """What processes leave that tests kill goes with pytest's own folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)  # of this process too: it is asked for anew
        yield


@pytest.fixture(scope="session")
def programs_of_tests(tmp_path_factory):
    """Programs compiled by one test of this process serve the others."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def one_device():
    """The mesh of a lone device is in force."""
    import jax

    from slicewise.config import RunConfig
    from slicewise.parallel.cluster import by_slice
    from slicewise.parallel.mesh import build_mesh

    with jax.set_mesh(build_mesh(RunConfig(), by_slice(jax.devices()[:1]))):
        yield


class SlicewiseCommand:
    """The real command in processes of its own, with one device each unless told otherwise."""

    def __init__(self, cache: Path):
        self._cache = cache

    def popen(
        self, *arguments: str, devices: int = 1, env: dict[str, str] | None = None, prefix=(), **options
    ):
        flags = f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}"
        environment = {"JAX_COMPILATION_CACHE_DIR": str(self._cache), "XLA_FLAGS": flags, "COLUMNS": "300"}
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "slicewise", *map(str, arguments)],
            env=os.environ | environment | (env or {}),
            stdin=subprocess.DEVNULL,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def run(self, *arguments: str, timeout_s: float = 120, **options) -> subprocess.CompletedProcess:
        with self.popen(*arguments, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    return SlicewiseCommand(tmp_path_factory.mktemp("compiled"))


DUMPS = Path(__file__).parent / "compile" / "dumps"


@pytest.fixture(scope="session")
def compiled():
    """name -> what the compiler left of a small step: made by scripts/make_compiled_dumps.py."""
    from slicewise.catalog import slices
    from slicewise.compile.compiler import Compiled, Request
    from slicewise.config import load_config

    def load(name):
        asked = json.loads((DUMPS / name / "request.json").read_text())
        config = load_config(None, asked["overrides"]).config
        request = Request(config, slices.cluster(asked["slice"], asked["slices"]), asked["program"])
        facts = json.loads((DUMPS / name / "facts.json").read_text())
        return Compiled(request, DUMPS / name, facts, True)

    return functools.cache(load)


@pytest.fixture(scope="session")
def compiled_step(compiled):
    """name -> the same step, read."""
    from slicewise.compile.analysis import analyse

    return functools.cache(lambda name: analyse(compiled(name)))


@pytest.fixture(scope="session")
def _programs(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def program_cache(_programs, monkeypatch):
    """Compiled programs of the whole session, apart from the user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(_programs))
    return _programs / "slicewise" / "programs"
