import subprocess
import sys


def test_reading_a_directory_needs_no_jax():
    code = (
        "import sys, slicewise.checkpoint.manifest; print({'jax', 'orbax.checkpoint'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
