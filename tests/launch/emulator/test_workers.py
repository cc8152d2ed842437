"""Workers of emulated slices: SSH as OpenSSH's server has it, real faults, metadata, and nothing left behind."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid

import asyncssh
import pytest

from slicewise.launch.emulator import local, marks
from slicewise.launch.queued_resources import (
    Request,
    connect,
    create,
    delete,
    emulator_target,
    wait,
    workers_of_client,
)
from slicewise.launch.queued_resources import nodes as nodes_of
from slicewise.launch.queued_resources.wait import wait_until_gone, wait_until_ready


@pytest.fixture(scope="session")
def api(cloud):
    return connect(emulator_target(cloud.directory))


@pytest.fixture
def make(api):
    """Makes a queued resource, by default of two slices of four workers; its name and workers. Deleted again."""
    made = []

    def make(count=2, kind="v5litepod-16", tier="spot", **fields):
        name = f"w{uuid.uuid4().hex[:8]}"
        create(api, Request(name, kind, count, tier=tier, **fields))
        made.append(name)
        wait(api, name, timeout_s=60)
        return name, workers_of_client(api, name)

    yield make
    for name in made:
        delete(api, name, force=True)
    for name in made:
        wait_until_gone(api, name, timeout_s=60)


def inject(cloud, fault, node, **fields):
    return local.control(cloud.state, "inject", fault=fault, node=node, **fields)


def connection(worker, **options):
    """A context manager: a connection that checks the host's key."""
    known = ([asyncssh.import_public_key(worker.known_host_key)], [], [])
    return asyncssh.connect(
        worker.host,
        worker.port,
        username=worker.user,
        client_keys=[worker.identity_file],
        known_hosts=known,
        config=None,
        gss_host=None,
        **options,
    )


async def close(links):
    for link in links:
        link.close()
        await link.wait_closed()


def check_silent(worker):
    """It does not even refuse a connection."""
    address = (worker.host, worker.port)
    with pytest.raises(TimeoutError), socket.create_connection(address, timeout=0.3):
        pass


def ssh(worker, command, **options):
    async def run():
        async with connection(worker) as link:
            return await link.run(command, **options)

    return asyncio.run(run())


def running(word) -> list[int]:
    """Processes with ``word`` among their arguments."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if word.encode() in file.read().split(b"\0"):
                found.append(int(pid))
    return found


@pytest.fixture
def word(until):
    """A number of seconds that only this test sleeps for, so that its processes can be told apart."""
    yield (made := f"9{uuid.uuid4().int % 10**8:08d}")
    until(lambda: not running(made))


def test_a_command_sees_its_own_vm(make, cloud):
    name, workers = make()
    assert [(w.slice_index, w.worker_index) for w in workers] == [(s, w) for s in range(2) for w in range(4)]
    done = ssh(
        workers[6],
        "echo $TPU_WORKER_ID $TPU_ACCELERATOR_TYPE $HOME; pwd; echo $XLA_FLAGS; echo oops >&2; cat; exit 3",
        input="typed",
    )
    home = cloud.directory / "vms/projects/emulated/locations/local-a/nodes" / f"{name}-1/2"
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"2 v5litepod-16 {home}", str(home)]
    assert "device_count=4" in lines[2]
    assert (lines[3], done.stderr, done.exit_status) == ("typed", "oops\n", 3)
    assert home.stat().st_mode & 0o077 == 0
    assert str(cloud.state.token) not in ssh(workers[0], "env").stdout


def test_a_signal_is_told_from_an_exit_code(make):
    _, workers = make(1)
    done = ssh(workers[0], "kill -9 $$")
    assert done.exit_signal[0] == "KILL"
    assert done.returncode == -9

    async def interrupt():
        async with connection(workers[0]) as link:
            process = await link.create_process(
                "trap 'echo caught; exit 7' INT; echo on; while :; do sleep 0.05; done"
            )
            await process.stdout.readline()
            process.send_signal("INT")
            return await process.wait()

    done = asyncio.run(interrupt())
    assert ("caught" in done.stdout, done.exit_status) == (True, 7)


def test_only_the_emulators_key_opens_the_door(make, tmp_path):
    _, workers = make(1)
    other = asyncssh.generate_private_key("ssh-ed25519")

    async def attempt():
        known = ([asyncssh.import_public_key(workers[0].known_host_key)], [], [])
        await asyncssh.connect(
            workers[0].host,
            workers[0].port,
            client_keys=[other],
            known_hosts=known,
            config=None,
            gss_host=None,
        )

    with pytest.raises(asyncssh.PermissionDenied):
        asyncio.run(attempt())


def test_a_key_in_the_nodes_metadata_opens_it_too(make, clients):
    key = asyncssh.generate_private_key("ssh-ed25519")
    name, workers = make(1)
    client = clients["v2 gRPC"]
    node = client.types.Node(
        name=f"projects/emulated/locations/local-a/nodes/{name}",
        metadata={"ssh-keys": f"me:{key.export_public_key().decode().strip()}\n"},
    )
    client.api.update_node(node=node, update_mask={"paths": ["metadata"]})

    async def attempt():
        known = ([asyncssh.import_public_key(workers[0].known_host_key)], [], [])
        async with asyncssh.connect(
            workers[0].host, workers[0].port, username="me", client_keys=[key], known_hosts=known, config=None,
            gss_host=None,
        ) as link:  # fmt: skip
            return (await link.run("echo in")).stdout

    assert asyncio.run(attempt()) == "in\n"


def test_without_a_terminal_a_command_survives_its_connection_and_with_one_it_does_not(make, word, until):
    _, workers = make(1)
    other = f"{int(word) + 1}"

    async def drop():
        link = await connection(workers[0])
        plain = await link.create_process(f"exec sleep {word}")
        tied = await link.create_process(f"exec sleep {other}", term_type="xterm")
        await asyncio.to_thread(until, lambda: running(word) and running(other))
        link.abort()
        await link.wait_closed()
        assert plain is not tied

    asyncio.run(drop())
    until(lambda: not running(other))
    assert running(word)
    [pid] = running(word)
    os.kill(pid, signal.SIGKILL)


def test_the_end_of_input_reaches_a_command_whose_connection_is_lost(make, until, tmp_path):
    _, workers = make(1)

    async def drop():
        link = await connection(workers[0])
        await link.create_process(f"echo > {tmp_path}/on; cat; echo > {tmp_path}/ended")
        await asyncio.to_thread(until, (tmp_path / "on").exists)
        link.abort()
        await link.wait_closed()

    asyncio.run(drop())
    until((tmp_path / "ended").exists)


@pytest.mark.parametrize("fault", ["preempt", "fail", "maintain"])
def test_a_lost_slice_takes_every_process_with_it_and_all_start_again(make, cloud, api, word, fault, until):
    name, workers = make(2, "v6e-8", startup_script="echo started >> starts")

    async def lose():
        links = [await connection(w) for w in workers]
        hidden = f"setsid nohup sh -c 'trap \"\" TERM HUP; sleep {word}' >/dev/null 2>&1 & sleep {word}"
        commands = [await link.create_process(hidden) for link in links]
        # each is a shell and its sleep, beside a sleep in a session of its own
        await asyncio.to_thread(until, lambda: len(running(word)) == 4)
        local.control(cloud.state, "capacity", family="v6e", chips=8)
        inject(cloud, fault, f"{name}-1")
        await asyncio.wait_for(commands[1].wait_closed(), 20)
        # the other slice runs on until there is a replacement
        await asyncio.to_thread(until, lambda: len(running(word)) == 2)
        assert not commands[0].is_closing()
        local.control(cloud.state, "capacity", family="v6e", chips=16)
        await asyncio.wait_for(commands[0].wait_closed(), 20)
        await close(links)

    asyncio.run(lose())
    until(lambda: not running(word))
    wait_until_ready(api, name, timeout_s=60)
    again = workers_of_client(api, name)
    assert again[0] == workers[0]  # a VM that restarts keeps its address and its disk
    assert again[1].port != workers[1].port  # a replacement is another machine
    until(lambda: ssh(again[0], "cat starts").stdout == "started\nstarted\n")
    until(lambda: ssh(again[1], "cat starts").stdout == "started\n")


def test_notice_of_a_preemption_is_a_sigterm_and_shows_in_the_metadata(make, cloud, until):
    name, workers = make(2, "v5litepod-4")
    shown = "curl -s -H Metadata-Flavor:Google $GCE_METADATA_IP/computeMetadata/v1/instance/preempted"
    assert ssh(workers[0], shown).stdout == "FALSE"

    async def noticed():
        async with connection(workers[0]) as link:
            script = f"trap '{shown}; echo; exit 76' TERM; echo on; while :; do sleep 0.05; done"
            process = await link.create_process(script)
            await process.stdout.readline()
            inject(cloud, "preempt", f"{name}-0", after_s=600)
            return await process.wait(timeout=60)

    done = asyncio.run(noticed())
    assert ("TRUE" in done.stdout, done.exit_status) == (True, 76)


def test_a_frozen_worker_is_silent_and_goes_on_where_it_was(make, cloud):
    name, workers = make(1, "v5litepod-4")

    async def freeze():
        async with connection(workers[0]) as link, connection(workers[0], keepalive_interval=0.2) as watched:
            counting = await link.create_process("for i in $(seq 1000); do echo $i; sleep 0.02; done")
            await counting.stdout.readline()
            inject(cloud, "freeze", name)
            await asyncio.wait_for(watched.wait_closed(), 10)  # its keepalives are not answered
            await asyncio.to_thread(check_silent, workers[0])
            silent = await asyncio.wait_for(_drain(counting.stdout), 5)
            inject(cloud, "heal", name)
            following = await asyncio.wait_for(counting.stdout.readline(), 10)
            return silent, int(following)

    last, following = asyncio.run(freeze())
    assert following == last + 1


async def _drain(stream):
    """The last number that had come before it fell silent."""
    last = 1
    while True:
        try:
            last = int(await asyncio.wait_for(stream.readline(), 0.5))
        except TimeoutError:
            return last


def test_a_partitioned_worker_runs_on_unseen_and_nothing_it_wrote_is_lost(make, cloud, tmp_path, until):
    name, workers = make(1, "v5litepod-4")

    async def cut():
        async with connection(workers[0]) as link:
            work = f"for i in $(seq 30); do echo $i | tee -a {tmp_path}/seen; sleep 0.02; done"
            counting = await link.create_process(work)
            await counting.stdout.readline()
            inject(cloud, "partition", name)
            await asyncio.to_thread(until, lambda: "30" in (tmp_path / "seen").read_text().split())
            await asyncio.to_thread(check_silent, workers[0])
            inject(cloud, "heal", name)
            return await counting.wait(timeout=60)

    done = asyncio.run(cut())
    assert done.stdout.split()[-1] == "30"
    assert done.exit_status == 0


def test_reset_kills_everything_and_heals(make, cloud, api, word, until):
    from slicewise.launch.queued_resources import reset

    name, workers = make(1, "v5litepod-4", startup_script=f"touch once; exec sleep {word}")
    until(lambda: len(running(word)) == 1)
    [first] = running(word)
    inject(cloud, "partition", name)
    reset(api, name)
    wait_until_ready(api, name, timeout_s=60)
    until(lambda: running(word) and first not in running(word))
    assert ssh(workers[0], "ls once").exit_status == 0
    assert nodes_of(api, name)[0].health.name == "HEALTHY"
    delete(api, name, force=True)
    wait_until_gone(api, name, timeout_s=60)
    until(lambda: not running(word))
    create(api, Request(name, "v5litepod-4"))  # the fixture deletes it


def test_the_metadata_server_answers_as_googles_does(make):
    name, workers = make(2, startup_script="exit 0", metadata={"mine": "yes"})
    address = ssh(workers[5], "echo $GCE_METADATA_HOST").stdout.strip()

    def get(path, host=None, **headers):
        sent = {"Metadata-Flavor": "Google", **({"Host": host} if host else {}), **headers}
        request = urllib.request.Request(f"http://{address}/computeMetadata/v1/{path}", headers=sent)
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["Metadata-Flavor"] == "Google"
            return answer.read().decode()

    attributes = "instance/attributes/"
    assert get(attributes + "agent-worker-number") == "1"
    assert get(attributes + "mine", host="metadata.google.internal") == "yes"
    assert get(attributes + "startup-script") == "exit 0"
    assert get(attributes + "worker-network-endpoints").split(",") == ["unknown:unknown:127.0.0.1"] * 4
    env = dict(line.split(": ") for line in get(attributes + "tpu-env").splitlines())
    assert env["NODE_ID"] == f"'{name}-1'"
    assert (env["MEGASCALE_NUM_SLICES"], env["MEGASCALE_SLICE_ID"], env["WORKER_ID"]) == ("'2'", "'1'", "'1'")
    assert get("project/project-id") == "emulated"
    assert get("instance/maintenance-event") == "NONE"
    assert "attributes/" in get("instance/").splitlines()
    assert json.loads(get("instance/?recursive=true"))["attributes"]["mine"] == "yes"
    for path, headers, status in (
        ("instance/none", {}, 404),
        ("../../etc/passwd", {}, 404),
        ("instance/id", {"Metadata-Flavor": "other"}, 403),
        ("instance/id", {"Host": "evil.example"}, 403),
        ("instance/id", {"X-Forwarded-For": "1.2.3.4"}, 403),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(path, **headers)
        assert refused.value.code == status, path
        refused.value.close()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_unmodified_jax_finds_its_peers_of_two_slices_by_the_metadata(make):
    _, workers = make(2, "v5litepod-8")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = (
        "import jax, os; os.environ.pop('TPU_SKIP_MDS_QUERY', None); jax.distributed.initialize();"
        "print(jax.process_index(), jax.process_count(), jax.device_count())"
    )
    command = f'JAX_COORDINATOR_PORT={port} JAX_FORCE_TPU_INIT=1 python -c "{program}"'

    async def run():
        async with connection(workers[0]) as one, connection(workers[1]) as two:
            return await asyncio.gather(one.run(command, timeout=120), two.run(command, timeout=120))

    done = asyncio.run(run())
    assert [d.stdout for d in done] == ["0 2 16\n", "1 2 16\n"], [d.stderr for d in done]


@pytest.mark.skipif(shutil.which("scp") is None, reason="needs OpenSSH's client")
def test_files_are_copied_by_scp_and_sftp(make, tmp_path):
    from slicewise.launch.queued_resources.ssh import scp_command

    _, workers = make(1, "v5litepod-4")
    (tmp_path / "a").write_text("data")
    for sources, target in ((["a"], ":sub/b"), ([":sub/b"], "back")):
        ssh(workers[0], "mkdir -p sub")
        words = scp_command(workers[0], sources, target, recursive=False)
        subprocess.run(words, cwd=tmp_path, check=True, timeout=20)
    assert (tmp_path / "back").read_text() == "data"


def test_a_process_that_starts_while_its_vm_ends_ends_too(make, api, word, until):
    name, workers = make(2)

    async def race():
        links = await asyncio.gather(*map(connection, workers))
        started = [link.create_process(f"setsid sleep {word}") for link in links]
        deletion = asyncio.to_thread(delete, api, name, force=True)
        await asyncio.gather(*started, deletion, return_exceptions=True)
        await close(links)

    asyncio.run(race())
    wait_until_gone(api, name, timeout_s=60)
    until(lambda: not running(word))
    create(api, Request(name, "v5litepod-4"))  # the fixture deletes it


def test_an_emulator_that_is_killed_leaves_no_process_behind(tmp_path, word, until):
    state = local.start(tmp_path / "e", ["--step", "0.01"])
    client = connect(emulator_target(tmp_path / "e"))
    script = f"setsid sh -c 'trap \"\" TERM; sleep {word}' & sleep {word}"
    create(client, Request("doomed", "v5litepod-4", 2, startup_script=script))
    wait(client, "doomed", timeout_s=60)
    until(lambda: len(running(word)) == 4)
    os.kill(state.pid, signal.SIGKILL)
    os.waitpid(state.pid, 0)
    until(lambda: not running(word))


def test_a_thousand_workers_fit_in_a_gigabyte(make, cloud):
    start_s = time.monotonic()
    _, workers = make(250)
    assert len({w.port for w in workers}) == 1000
    assert time.monotonic() - start_s < 60
    with open(f"/proc/{cloud.state.pid}/status") as file:
        resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    assert resident < 1 << 20  # KiB
    assert ssh(workers[999], "echo $TPU_WORKER_ID").stdout == "3\n"


def test_marks_find_processes_whatever_became_of_them(until):
    identity = uuid.uuid4().hex
    environment = {**os.environ, marks.MARK: f"{identity}/node/0"}
    subprocess.run(["setsid", "-f", "sleep", "1000"], env=environment, check=True)
    until(lambda: len(marks.marked([f"{identity}/"])) == 1)
    assert marks.marked([f"{identity}/other"]) == marks.marked([]) == []
    marks.send([f"{identity}/node/"], signal.SIGKILL)
    until(lambda: marks.marked([f"{identity}/"]) == [])
