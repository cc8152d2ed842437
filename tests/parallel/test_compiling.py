"""Who compiles when, with several processes acted out in one; real ones: tests/train/test_resume.py."""

import hashlib
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax._src import cache_key, compilation_cache

from slicewise.parallel import cluster, compiling


class Store:
    """The key-value store of the coordination service."""

    def __init__(self):
        self.values, self._changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, 10)
            return self.values[key]


class Lowered:
    def __init__(self, compile):
        self.compile = compile


BOTH = [SimpleNamespace(process_index=n) for n in (0, 0, 1, 1)]


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(cluster, "coordination_client", lambda: store)
    monkeypatch.setenv("SLICEWISE_COORDINATOR", "127.0.0.1:1")
    return store


@pytest.fixture
def as_process(monkeypatch):
    return lambda number: monkeypatch.setattr(jax, "process_index", lambda: number)


def waiter(lowered):
    thread = threading.Thread(target=compiling.compile_in_turn, args=("step", lowered, BOTH))
    thread.start()
    return thread


def test_the_others_compile_when_the_first_process_has(store, as_process):
    order = []
    as_process(1)
    other = waiter(Lowered(lambda: order.append("other")))
    other.join(0.05)
    assert order == []
    as_process(0)
    compiling.compile_in_turn("step", Lowered(lambda: order.append("first")), BOTH)
    other.join(10)
    assert order == ["first", "other"]


def test_what_fails_in_the_first_process_is_tried_by_the_others(store, as_process):
    as_process(0)
    with pytest.raises(RuntimeError, match="no memory"):
        compiling.compile_in_turn(
            "step", Lowered(lambda: (_ for _ in ()).throw(RuntimeError("no memory"))), BOTH
        )
    as_process(1)
    assert compiling.compile_in_turn("step", Lowered(lambda: "compiled"), BOTH) == "compiled"


def test_a_program_of_one_process_and_processes_on_several_machines_wait_for_nobody(
    store, as_process, monkeypatch
):
    as_process(1)
    assert compiling.compile_in_turn("step", Lowered(lambda: "compiled"), BOTH[2:]) == "compiled"
    monkeypatch.setenv("SLICEWISE_COORDINATOR", "10.0.0.2:1")
    assert compiling.compile_in_turn("step", Lowered(lambda: "compiled"), BOTH) == "compiled"
    assert store.values == {}


def test_programs_of_all_have_the_key_of_process_0_and_others_their_own(store, as_process, monkeypatch):
    def of_machine(hash_obj, devices):
        hash_obj.update(f"process {jax.process_index()}".encode())

    def key(devices):
        hashed = hashlib.sha256()
        cache_key._hash_accelerator_config(hashed, np.array(devices))
        return hashed.hexdigest()

    monkeypatch.setattr(cache_key, "_hash_accelerator_config", of_machine)
    as_process(0)
    compiling.share_cache()
    assert cache_key._hash_accelerator_config is of_machine
    first = key(BOTH)
    as_process(1)
    assert key(BOTH) != first
    alone = key(BOTH[2:])
    compiling.share_cache()
    assert key(BOTH) == first
    assert key(BOTH[2:]) == alone != first


@pytest.fixture
def cache(tmp_path):
    """JAX's cache in a folder of the test's own."""
    keys = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {key: getattr(jax.config, key) for key in keys}
    for key, value in keys.items():
        jax.config.update(key, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for key, value in before.items():
        jax.config.update(key, value)
    compilation_cache.reset_cache()


def test_a_damaged_entry_of_the_cache_is_made_again(cache, monkeypatch):
    """Where JAX alone warns, and a warning is an error here."""
    monkeypatch.setattr(compilation_cache, compiling._READ, compilation_cache.get_executable_and_time)
    compiling.mend_cache()
    compiling.mend_cache()

    def compiled():
        return jax.jit(lambda x: x * 3 + 1).lower(1.0).compile()

    compiled()
    (entry,) = cache.glob("*-cache")
    whole = entry.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], bytes(len(whole))):
        entry.write_bytes(damaged)
        assert compiled()(1.0) == 4
        assert entry.read_bytes()[:2] == whole[:2]
        assert entry.stat().st_size > len(whole) // 2
    again = entry.stat().st_mtime_ns
    compiled()
    assert entry.stat().st_mtime_ns == again
