"""What Grain does to the imports of other threads, and that they do not see it."""

import subprocess
import sys

# A thread that imports all the time beside the one that imports Grain, with as many switches between them as can be.
IMPORTS_BESIDE = """
import sys, threading
import etils.epy, orbax.checkpoint

replaced = []
lazy_imports = etils.epy.lazy_imports
def recorded(*args, **kwargs):
    replaced.append(sys.getswitchinterval())
    return lazy_imports(*args, **kwargs)
etils.epy.lazy_imports = recorded

from slicewise.data import grain_import
wrong, done = set(), threading.Event()
def imports():
    while not done.is_set():
        from json.decoder import JSONDecoder
        if not isinstance(JSONDecoder, type):
            wrong.add(repr(JSONDecoder))
sys.setswitchinterval(1e-5)
thread = threading.Thread(target=imports)
thread.start()
grain = grain_import.load()
done.set()
thread.join()
assert callable(grain.experimental.index_shuffle)
assert sys.getswitchinterval() < 1e-3, "left as it was not found"
assert replaced, "Grain no longer replaces __import__: grain_import can go"
assert min(replaced) > grain_import.UNINTERRUPTED_S / 2, replaced
assert not wrong, wrong
"""


def test_other_threads_import_what_they_name_while_grain_is_imported():
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS_BESIDE], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
