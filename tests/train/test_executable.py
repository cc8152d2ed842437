"""A step from a file is the step that is compiled here."""

import json
import pickle

import pytest

from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.parallel import cluster
from slicewise.parallel.mesh import build_mesh
from slicewise.train import executable
from slicewise.train.step import build_train_step

TINY = [
    "model=demo-tiny",
    "dataset=synthetic",
    "sequence_length=64",
    "global_batch_size=8",
    "steps=2",
    "eval_batches=0",
]
TINY += ["checkpoint_every=0", "tensorboard=false"]


@pytest.fixture(scope="module")
def step_and_file(tmp_path_factory):
    import jax

    step = step_of(*TINY)
    with jax.set_mesh(step.mesh):
        compiled = step.update.lower(step.abstract_state, step.abstract_batch).compile()
    path = tmp_path_factory.mktemp("executable") / "step.bin"
    path.write_bytes(executable.dumps(compiled))
    return step, path


def step_of(*overrides):
    """Of one device."""
    import jax

    config = load_config(None, list(overrides)).config
    return build_train_step(config, build_mesh(config, cluster.by_slice(jax.devices()[:1])))


def test_a_run_with_an_executable_takes_the_same_steps(step_and_file, tmp_path, command):
    _, path = step_and_file
    losses = []
    for name, more in (("a", [f"executable={path}"]), ("b", [])):
        ran = command.run("train", *TINY, f"output_directory={tmp_path / name}", *more)
        assert ran.returncode == 0, ran.stderr
        lines = (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


def test_an_executable_of_another_step_is_refused(step_and_file):
    _, path = step_and_file
    other = step_of(*TINY, "sequence_length=128")
    with pytest.raises(UserError, match="of another step"):
        executable.load(str(path), other)


def test_what_is_no_executable_of_these_versions_is_refused(step_and_file, tmp_path):
    step, path = step_and_file
    kept = pickle.loads(path.read_bytes())
    old = tmp_path / "old.bin"
    old.write_bytes(pickle.dumps(kept | {"versions": {"jax": "0.1"}}))
    with pytest.raises(UserError, match=r"made with jax 0\.1"):
        executable.load(str(old), step)
    odd = [
        pickle.dumps(x) for x in ([1], {"versions": 1, "executable": 2}, {"versions": {}, "executable": (1,)})
    ]
    damaged = bytes([path.read_bytes()[0], 71]) + path.read_bytes()[2:500]
    for content in (b"", b"not a pickle", *odd, damaged):
        (tmp_path / "bad.bin").write_bytes(content)
        with pytest.raises(UserError, match="none of slicewise compile"):
            executable.load(str(tmp_path / "bad.bin"), step)
    with pytest.raises(UserError, match="No such file"):
        executable.load(str(tmp_path / "absent.bin"), step)
