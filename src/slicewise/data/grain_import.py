"""Grain, imported while other threads trace and import."""

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

UNINTERRUPTED_S = 0.05  # far longer than the replacement lasts
_lock = threading.Lock()


def load() -> Any:
    """The module ``grain`` with its ``grain.experimental``. Raises ImportError.

    For some microseconds of its import Grain replaces ``builtins.__import__``, through ``lazy_imports`` of etils,
    and for all threads: what another one imports then is a lazy module, whatever its name stands for.
    """
    with _lock:
        if not sys.modules.get("grain"):
            epy: Any = importlib.import_module("etils.epy")
            lazy_imports = epy.lazy_imports
            epy.lazy_imports = _uninterrupted(lazy_imports)
            try:
                importlib.import_module("grain")
            finally:
                epy.lazy_imports = lazy_imports
        importlib.import_module("grain.experimental")
        return sys.modules["grain"]


def _uninterrupted(lazy_imports: Callable[..., Any]) -> Callable[..., Any]:
    """``lazy_imports`` without a switch to another thread inside."""

    @contextlib.contextmanager
    def context(*args: Any, **kwargs: Any) -> Iterator[None]:
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(UNINTERRUPTED_S)
        time.sleep(0)  # a thread that waits for its turn has it now; the next turn is an interval away
        try:
            with lazy_imports(*args, **kwargs):
                yield
        finally:
            sys.setswitchinterval(interval_s)

    return context
