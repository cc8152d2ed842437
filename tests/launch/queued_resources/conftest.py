"""One emulator for all tests of this folder, and slicewise's client of it."""

import contextlib
import uuid

import pytest

from slicewise.errors import UserError
from slicewise.launch.emulator import local
from slicewise.launch.queued_resources import Request, connect, create, delete, emulator_target, wait


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """v6e has 16 chips, v5p a quota of 16."""
    path = tmp_path_factory.mktemp("qr") / "state"
    options = ["--step", "0.01", "--capacity", "v6e=16", "--quota", "v5p=16", "--reservation", "mine"]
    with local.started(path, options):
        yield path


@pytest.fixture
def said():
    return []


@pytest.fixture
def client(directory, said):
    """``said`` gets what it says of repeated calls."""
    return connect(emulator_target(directory), say=said.append, retry_for_s=5)


@pytest.fixture
def control(directory):
    state = local.running(directory)
    return lambda verb, **fields: local.control(state, verb, **fields)


@pytest.fixture
def make(client):
    """Makes a queued resource that is deleted again; its name."""
    made = []

    def make(kind="v5litepod-4", count=1, *, active=True, **fields):
        name = f"q{uuid.uuid4().hex[:8]}"
        create(client, Request(name, kind, count, **fields))
        made.append(name)
        if active:
            wait(client, name, timeout_s=60)
        return name

    yield make
    for name in made:
        with contextlib.suppress(UserError):  # the test has deleted it
            delete(client, name, force=True)
