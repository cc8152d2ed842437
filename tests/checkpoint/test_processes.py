"""Real faults: processes killed while they save, and clusters of several processes."""

import os
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from slicewise.checkpoint.store import CheckpointStore

STATE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from slicewise.checkpoint.store import CheckpointStore

def make_state(step, rows):
    mesh = jax.make_mesh((jax.device_count(),), ("a",), axis_types=(AxisType.Explicit,))
    w = np.arange(rows * 512, dtype=np.float32).reshape(rows, 512) * step
    place = lambda x, spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])
    return {"w": place(w, P("a")), "step": place(np.array(step, np.int32), P())}

def save(store, step, rows):
    return store.save(step, make_state(step, rows), data_state=np.array([[step, 0]]), metadata={"step": step})
"""

SAVE_TWICE = """
store = CheckpointStore(sys.argv[1], keep=3)
save(store, 1, 16384)
store.wait()
print("first", flush=True)
save(store, 2, 16384)
store.wait()
"""


def check_restores(store: CheckpointStore, step: int, rows: int) -> None:
    mesh = jax.make_mesh((8,), ("b",))
    wanted = {
        "w": jax.ShapeDtypeStruct((rows, 512), np.float32, sharding=NamedSharding(mesh, P(None, "b"))),
        "step": jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, P())),
    }
    restored = store.restore(step, wanted)
    expected = np.arange(rows * 512, dtype=np.float32).reshape(rows, 512) * step
    np.testing.assert_array_equal(np.asarray(restored.state["w"]), expected)
    assert int(restored.state["step"]) == step
    assert restored.data_state.tolist() == [[step, 0]]
    assert restored.metadata == {"step": step}


def wait_for(condition, process, timeout_s=60):
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.0005)


@pytest.mark.multiprocess
@pytest.mark.parametrize("moment", ["directory made", "data growing", "all written"])
def test_a_process_killed_while_it_saves_loses_only_that_step(tmp_path, moment):
    directory = tmp_path / "checkpoints"
    unfinished = directory / "2.orbax-checkpoint-tmp"
    process = subprocess.Popen(
        [sys.executable, "-c", STATE + SAVE_TWICE, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    reached = {
        "directory made": unfinished.exists,
        "data growing": lambda: any((unfinished / "state").glob("ocdbt.process_0/d/*")),
        "all written": lambda: (unfinished / "_CHECKPOINT_METADATA").exists() or (directory / "2").exists(),
    }[moment]
    try:
        wait_for(reached, process)
    finally:
        process.kill()
        process.communicate()
    with CheckpointStore(str(directory), keep=3) as store:
        newest = store.latest()
        assert newest in ((1, 2) if moment == "all written" else (1,))
        check_restores(store, newest, 16384)
        one = jax.numpy.ones(3)
        assert store.save(2, {"w": one}, data_state=np.zeros((0, 2), np.int64), metadata={}, overwrite=True)
        store.wait()
        assert store.latest() == 2
        assert sorted(os.listdir(directory)) == ["1", "2"]


CLUSTER = """
import os, pathlib, resource, time
from jax.experimental import multihost_utils
from slicewise.errors import UserError
address, rank, root = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(address, 2, rank)
assert jax.device_count() == 4 and jax.local_device_count() == 2

def refused(call, *args):
    try:
        call(*args)
    except UserError as e:
        return str(e)
    raise AssertionError("no error")

with CheckpointStore(f"{root}/private-{rank}", keep=1) as private:
    assert private.latest() is None
    message = refused(save, private, 1, 64)
    assert "process 1 does not see what process 0 writes" in message, message
    assert "storage that all workers share" in message, message
with CheckpointStore(f"{root}/uneven-{rank}", keep=1) as uneven:
    message = refused(uneven.latest)
    assert "process 1 sees fewer checkpoints" in message, message
with CheckpointStore(f"{root}/shared", keep=2) as store:
    assert store.latest() == 3
    for step in (4, 5, 6):
        assert save(store, step, 64)
    assert not save(store, 6, 64)
    assert store.latest() == 6
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    like = jax.tree.map(abstract, make_state(0, 64))
    restored = store.restore(5, like)
    same = jax.jit(lambda a, b: jnp.all(a == b))(restored.state["w"], make_state(5, 64)["w"])
    assert bool(same)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # acts like a full disk, of this process alone
    began_s = time.monotonic()
    assert save(store, 7, 4096)
    message = refused(store.wait)
    assert "checkpoint of step 7 could not be written" in message, message
    assert "File too large" in message, message
    assert time.monotonic() - began_s < 30
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert save(store, 8, 64)
    assert store.wait() == 8
    if rank == 0:
        for path in pathlib.Path(f"{root}/shared/8/state/ocdbt.process_1/d").iterdir():
            os.truncate(path, path.stat().st_size // 2)
    multihost_utils.sync_global_devices("damaged")
    said = []
    assert store.restore_newest(like, said.append).step == 6
    assert "step 8" in said[0] and "It is quarantined, and step 6 used." in said[0], said
    assert store.latest() == 6
jax.distributed.shutdown()
print("done", flush=True)
"""


@pytest.mark.multiprocess
def test_two_processes_save_restore_and_fail_together_and_one_process_restores_theirs(
    tmp_path, ranks_end_well
):
    namespace: dict = {}
    exec(STATE, namespace)
    with CheckpointStore(str(tmp_path / "shared"), keep=1) as store:
        namespace["save"](store, 3, 64)
    shutil.copytree(tmp_path / "shared", tmp_path / "uneven-0")
    ranks_end_well(STATE + CLUSTER, tmp_path, count=2, devices=2)
    assert sorted(os.listdir(tmp_path / "shared")) == ["6", "8"]
    with CheckpointStore(str(tmp_path / "shared"), keep=2) as store:
        assert store.latest() == 6
        check_restores(store, 6, 64)
