"""The local tier over real processes: two slices of two hosts with one device each."""

import pytest

HOSTS = """
import shutil, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from slicewise.checkpoint.tiers import LocalTier
from slicewise.errors import UserError

address, rank, root = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.distributed.initialize(address, 4, rank)
devices = np.array(sorted(jax.devices(), key=lambda d: d.process_index)).reshape(2, 2)
said, saved = [], []

def mesh(*shape):
    return Mesh(devices.reshape(shape), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)

def state(mesh, step, spec):
    w = np.arange(32, dtype=np.float32).reshape(8, 4) * step
    place = lambda x, *s: jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(*s)), lambda i: x[i])
    return {"w": place(w, *spec), "b": place(w[0].astype(jnp.bfloat16)), "step": place(np.array(step, np.int32))}

def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

def tier(name, run="r"):
    return LocalTier(root / name / f"h{rank}", run, devices, said.append, saved.append)

def save(tier, *steps, mesh, spec):
    for step in steps:
        tier.save(step, state(mesh, step, spec), data_state=np.array([[step, 0]]), metadata={"step": step})
    tier.close()

def wipe(name, *hosts):
    if rank in hosts:
        shutil.rmtree(root / name / f"h{rank}")

def check(tier, step, mesh, spec, beyond=0):
    assert tier.pick(beyond) == step
    expected = state(mesh, step, spec)
    restored = tier.restore(like(expected))
    for name, x in expected.items():
        for ours, theirs in zip(restored.state[name].addressable_shards, x.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(ours.data), np.asarray(theirs.data), err_msg=name, strict=True)
    assert restored.data_state.tolist() == [[step, 0]] and restored.metadata == {"step": step}

# data parallel over slices: each slice has everything
replicated = dict(mesh=mesh(2, 2), spec=("fsdp",))
save(tier("a"), 1, 2, 3, **replicated)
assert saved == [1, 2, 3], saved
assert sorted(p.name for p in (root / "a" / f"h{rank}").iterdir()) == ["2", "3"]
check(tier("a"), 3, **replicated)
wipe("a", 2, 3)  # the second slice is new
check(tier("a"), 3, **replicated)
check(tier("a"), 3, mesh=mesh(1, 4), spec=(None, "fsdp"))  # into another layout
if rank == 1:  # a bit of what nobody else has any more
    path = root / "a" / "h1" / "3" / "blocks"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
check(tier("a"), 2, **replicated)
assert tier("a").pick(3) is None
assert tier("a", "another run of that name").pick(0) is None
wipe("a", 0)
assert tier("a").pick(0) is None

# sharded over slices: a peer in the next slice has a copy
divided = dict(mesh=mesh(1, 4), spec=("fsdp",))
save(tier("b"), 5, **divided)
wipe("b", 0, 1)
check(tier("b"), 5, **divided)
check(tier("b", ""), 5, **replicated)
one = tier("b")
assert one.pick(0) == 5
try:
    one.restore({"w": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=NamedSharding(mesh(2, 2), P()))})
    raise AssertionError("no error")
except UserError as error:
    assert "w is float32[8, 4] in the local checkpoint of step 5, but float32[8, 2] here" in str(error), error

# a disk that cannot be written ends nothing
(root / "c").mkdir(exist_ok=True)
if rank == 3:
    (root / "c" / "h3").write_text("in the way")
save(tier("c"), 7, **replicated)
assert bool(said) == (rank == 3), said
assert rank != 3 or "warning: no local checkpoint on process 3" in said[0]
check(tier("c"), 7, **replicated)
print("done", flush=True)
"""


@pytest.mark.multiprocess
def test_a_state_survives_in_the_other_hosts_whatever_is_lost_of_one_slice(tmp_path, ranks_end_well):
    ranks_end_well(HOSTS, tmp_path, count=4, devices=1)
