"""Workers in network namespaces: own addresses, port 22, 169.254.169.254, cables that are pulled. Needs root."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import uuid
from pathlib import Path

import asyncssh
import pytest

from slicewise.errors import UserError
from slicewise.launch.emulator import local, networks
from slicewise.launch.emulator.hosts import LOOPBACK, METADATA, is_ours
from slicewise.launch.queued_resources import (
    Request,
    connect,
    create,
    emulator_target,
    wait,
    workers_of_client,
)
from slicewise.launch.queued_resources.wait import wait_until_ready


def namespaces_can_be_had() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or Path(f"/sys/class/net/{networks.BRIDGE}").exists():
        return False
    name = f"swtest{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


needs_namespaces = pytest.mark.skipif(not namespaces_can_be_had(), reason="needs root and network namespaces")


def left_over() -> list[str]:
    """Namespaces of emulators, and their bridge."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.startswith("sw")]
    files = [p.name for p in Path("/etc/netns").glob("sw*")]
    return names + files + [n for n in os.listdir("/sys/class/net") if n == networks.BRIDGE]


def ssh(worker, command):
    async def run():
        known = ([asyncssh.import_public_key(worker.known_host_key)], [], [])
        options = {
            "username": worker.user,
            "client_keys": [worker.identity_file],
            "config": None,
            "gss_host": None,
        }
        async with asyncssh.connect(worker.host, worker.port, known_hosts=known, **options) as link:
            return (await link.run(command, timeout=20)).stdout

    return asyncio.run(run())


@needs_namespaces
def test_workers_have_addresses_of_their_own_and_cables_that_can_be_pulled(tmp_path, until):
    directory = tmp_path / "e"
    with local.started(directory, ["--netns", "--step", "0.01"]) as state:
        client = connect(emulator_target(directory))
        create(client, Request("n", "v5litepod-8", 2, metadata={"mine": "yes"}))
        wait(client, "n", timeout_s=60)
        workers = workers_of_client(client, "n")
        assert len({w.host for w in workers}) == 2
        assert {w.port for w in workers} == {22}
        server = "http://metadata.google.internal/computeMetadata/v1/instance"  # by name, as scripts have it
        asked = (
            f"curl -s -H Metadata-Flavor:Google {server}/attributes/mine {server}/hostname; echo; hostname -i"
        )
        assert ssh(workers[1], asked).split() == ["yesn-1-w-0", workers[1].host]

        reach = (
            f"timeout 0.5 bash -c '</dev/tcp/{workers[0].host}/22' 2>/dev/null && echo reached || echo cut"
        )
        until(lambda: ssh(workers[1], reach) == "reached\n")
        local.control(state, "inject", fault="partition", node="n-0")
        assert ssh(workers[1], reach) == "cut\n"  # not only from outside: workers cannot talk either
        address = (workers[0].host, 22)
        with (
            pytest.raises(OSError, match="timed out|No route"),
            socket.create_connection(address, timeout=0.3),
        ):
            pass
        local.control(state, "inject", fault="heal", node="n-0")
        until(lambda: ssh(workers[1], reach) == "reached\n")

        local.control(state, "inject", fault="fail", node="n-0")
        wait_until_ready(client, "n", timeout_s=60)
        again = workers_of_client(client, "n")
        assert (again[0].host != workers[0].host, again[1]) == (True, workers[1])
    assert left_over() == []


@needs_namespaces
def test_a_killed_emulator_leaves_no_namespace(tmp_path, until):
    state = local.start(tmp_path / "e", ["--netns", "--step", "0.01"])
    client = connect(emulator_target(tmp_path / "e"))
    create(client, Request("n", "v5litepod-4"))
    wait(client, "n", timeout_s=60)
    assert left_over()
    with pytest.raises(UserError, match="one emulator at a time"):
        local.start(tmp_path / "other", ["--netns"])
    os.kill(state.pid, signal.SIGKILL)
    os.waitpid(state.pid, 0)
    until(lambda: left_over() == [])


def test_without_root_or_the_program_ip_it_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="--netns needs root"):
        asyncio.run(networks.Namespaces("0123456789").start())


@pytest.mark.parametrize(
    ("header", "names", "ours"),
    [
        ("127.0.0.1:80", LOOPBACK, True),
        ("LOCALHOST", LOOPBACK, True),
        ("[::1]:8080", LOOPBACK, True),
        ("metadata.google.internal", METADATA, True),
        ("metadata.google.internal", LOOPBACK, False),
        ("127.0.0.1.evil.example", LOOPBACK, False),
        ("evil.example:127", LOOPBACK, False),
        ("", LOOPBACK, False),
    ],
)
def test_host_headers(header, names, ours):
    assert is_ours(header, names) == ours
