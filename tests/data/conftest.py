"""Configs and lost privileges for the tests of the data."""

import contextlib
import os

import hypothesis
import pytest

from slicewise.config import load_config

hypothesis.settings.register_profile("no deadline", deadline=None)  # wall times vary with the load
hypothesis.settings.load_profile("no deadline")


@pytest.fixture
def config():
    def make(**keys):
        return load_config(None, [f"{key}={value}" for key, value in keys.items()]).config

    return make


@pytest.fixture
def unprivileged():
    """A context in which the superuser, whom no file mode stops, is nobody."""

    @contextlib.contextmanager
    def drop():
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return drop
