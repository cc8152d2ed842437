"""The house: which folder may import which, what starts without JAX, and how long a file may be."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_LINES = 600


def test_layers_and_forbidden_imports():
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
    ]
    done = subprocess.run([*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["config", "steps=3"],
        ["train", "--help"],
        ["train", "stepz=3"],
        ["job", "list"],
        ["compile", "--chip", "h100", "--topology", "8"],
    ],
)
def test_what_needs_no_device_imports_no_jax(arguments):
    script = (
        "import sys; from slicewise.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'orbax', 'grain', 'optax'} & set(sys.modules); sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_files_stay_readable():
    long = {
        str(path.relative_to(ROOT)): n
        for path in SOURCES
        if (n := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long
    assert len(SOURCES) > 30


def test_tests_mirror_the_source_tree():
    folders = {path.parent.relative_to(ROOT / "src" / "slicewise") for path in SOURCES}
    missing = [f for f in folders if not (ROOT / "tests" / f).is_dir()]
    assert not missing
