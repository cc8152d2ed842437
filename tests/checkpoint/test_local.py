"""What one host keeps on its disk, and which host sends what to which."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.checkpoint import local
from slicewise.checkpoint.exchange import rounds
from slicewise.checkpoint.local import Index, Stored

ARRAYS = {"w": Stored((4, 6), "float32", (2, 1), "0badcafe"), "step": Stored((), "int32", (), "00000001")}
BLOCKS = {("w", 1): np.arange(12, dtype=np.float32).reshape(2, 6), ("step", 0): np.int32(7)}


def index(step, run="run"):
    return Index(run, step, ARRAYS, [[step, 0]], {"step": step}, {})


def write(folder, *steps):
    for step in steps:
        local.write(folder, index(step), {k: np.asarray(v) for k, v in BLOCKS.items()}, keep=2)


def test_the_newest_steps_stay_and_what_is_read_is_what_was_written(tmp_path):
    write(tmp_path, 2, 4, 6)
    found = local.found(tmp_path)
    assert sorted(found) == [4, 6]
    assert found[6].arrays == ARRAYS
    assert (found[6].data_state, found[6].metadata) == ([[6, 0]], {"step": 6})
    blocks = local.read(tmp_path, found[6])
    assert blocks[("w", 1)].tobytes() == BLOCKS[("w", 1)].tobytes()
    assert blocks[("step", 0)].tobytes() == np.int32(7).tobytes()


def damaged(path, how):
    data = path.read_bytes()
    if how == "absent":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])


@pytest.mark.parametrize("name", [local.BLOCKS, local.INDEX])
@pytest.mark.parametrize("how", ["absent", "cut", "empty", "one bit"])
def test_a_step_that_is_not_whole_or_not_as_it_was_is_passed_over(tmp_path, name, how):
    write(tmp_path, 2, 4)
    damaged(tmp_path / "4" / name, how)
    found = local.found(tmp_path)
    if (name, how) == (local.BLOCKS, "one bit"):  # which only reading tells
        assert list(local.read(tmp_path, found[4])) == [("step", 0)]
    else:
        assert list(found) == [2]
    assert len(local.read(tmp_path, found[2])) == 2


def test_foreign_things_in_the_folder_do_no_harm(tmp_path):
    assert local.found(tmp_path / "none") == {}
    write(tmp_path, 2)
    (tmp_path / "notes").write_text("x")
    (tmp_path / "8").mkdir()
    shutil.copytree(tmp_path / "2", tmp_path / "6")  # of another step than it says
    other = json.loads((tmp_path / "2" / local.INDEX).read_text()) | {"format": 99}
    (tmp_path / "8" / local.INDEX).write_text(json.dumps(other))
    assert list(local.found(tmp_path)) == [2]


def test_what_differs_in_a_single_digest_does_not_belong_together():
    one = index(4)
    assert one.content == index(4).content
    assert one.content != index(5).content
    assert one.content != index(4, run="another").content
    arrays = ARRAYS | {"step": Stored((), "int32", (), "00000002")}
    assert one.content != Index("run", 4, arrays, [[4, 0]], {}, {}).content


block_sets = st.lists(st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 5))), min_size=1, max_size=7)


@given(block_sets, st.data())
def test_after_the_rounds_every_process_has_what_it_needs_and_none_did_two_things_at_once(have, data):
    every = sorted(set().union(*have))
    need = [data.draw(st.sets(st.sampled_from(every)) if every else st.just(set())) for _ in have]
    held = [set(blocks) for blocks in have]
    for this in rounds(have, need):
        senders = [source for source, _ in this.values()]
        assert len(senders) == len(set(senders))
        before = [set(blocks) for blocks in held]
        for target, (source, blocks) in this.items():
            assert blocks
            assert set(blocks) <= before[source]
            held[target] |= set(blocks)
    assert all(wanted <= has for wanted, has in zip(need, held, strict=True))
    if need == [set(blocks) for blocks in have]:
        assert rounds(have, need) == []


def test_many_hosts_get_one_block_in_few_rounds():
    have = [{("w", 0)}] + [set() for _ in range(15)]
    assert len(rounds(have, [{("w", 0)}] * 16)) == 4
