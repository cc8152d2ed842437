"""slicewise qr and slicewise emulator through the command, against an emulator."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest

from slicewise import cli
from slicewise.errors import ExitCode
from slicewise.launch.emulator import local


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "state"
    with local.started(path, ["--step", "0.01", "--capacity", "v6e=16", "--quota", "v5p=16"]):
        yield path


@pytest.fixture(autouse=True)
def here(directory, monkeypatch):
    """The emulator that commands find; no project of Google Cloud."""
    monkeypatch.setenv("SLICEWISE_EMULATOR", str(directory))
    monkeypatch.delenv("SLICEWISE_PROJECT", raising=False)
    monkeypatch.delenv("SLICEWISE_ZONE", raising=False)


@pytest.fixture
def run(capfd):
    """Runs a command here; (exit code, standard output, standard error)."""

    def run(*words):
        code = cli.main([*map(str, words)])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def name():
    made = f"c{uuid.uuid4().hex[:8]}"
    yield made
    cli.main(["qr", "delete", made, "--force", "--async"])


def test_from_create_to_delete(run, name, tmp_path):
    script = tmp_path / "start.sh"
    script.write_text("echo hello\n")
    options = "--spot --network n --subnetwork s --tag t --label a=b --valid-until 6h --timeout 60s"
    account = ("--service-account", "me@p.iam.gserviceaccount.com", "--startup-script", script)
    slices = ("--accelerator-type", "v5litepod-16", "--node-count", 2, "--node-prefix", f"{name}p")
    code, out, err = run("qr", "create", name, *slices, *options.split(), *account)
    assert (code, out.splitlines()[-1]) == (0, f"{name}: ACTIVE")
    assert "asked for 2 x v5litepod-16 (emulator emulated, zone local-a)" in out
    assert f"{name}: ACTIVE for 0 s, waiting for " in err
    code, out, _ = run("qr", "list")
    row = next(line for line in out.splitlines() if line.startswith(name))
    assert row.split()[1:4] == ["ACTIVE", "v5litepod-16", "spot"]
    assert name in [q["name"].rsplit("/", 1)[1] for q in json.loads(run("qr", "list", "--json")[1])]
    code, out, _ = run("qr", "describe", name)
    assert f"  {name}p-1 READY: 127.0.0.1" in out.splitlines()
    described = json.loads(run("qr", "describe", name, "--json")[1])
    assert [n["state"] for n in described["nodes"]] == ["READY"] * 2
    assert run("qr", "wait", name)[0] == 0
    code, out, _ = run("qr", "reset", name)  # asks for no confirmation, unlike gcloud
    assert out.splitlines() == [f"{name}: restarting", f"{name}: ACTIVE"]
    assert run("qr", "delete", name)[0] == ExitCode.USER
    code, out, _ = run("qr", "delete", name, "--force")
    assert (code, out.splitlines()[-1]) == (0, f"{name}: gone")
    code, _, err = run("qr", "describe", name)
    assert (code, "was not found" in err) == (ExitCode.NOT_FOUND, True)


def test_gc_shows_and_deletes_the_dead(run, name):
    run(
        "qr", "create", name, "--accelerator-type", "v5litepod-4", "--spot", "--label", "slicewise-owner=gone"
    )
    assert run("emulator", "inject", "preempt", name)[0] == 0
    code, _, err = run("qr", "wait", name)
    assert (code, "SUSPENDED by the service" in err) == (ExitCode.NO_SLICES, True)
    assert run("qr", "gc", "--owner", "nobody")[1] == "nothing to delete\n"
    code, out, _ = run("qr", "gc", "--owner", "gone", "--dry-run")
    assert out == f"{name} SUSPENDED, 1 x v5litepod-4, owner gone\n"
    assert run("qr", "gc", "--owner", "gone")[1].splitlines()[1:] == [f"{name}: deleting", f"{name}: gone"]
    assert run("qr", "gc", "--all-owners")[1] == "nothing to delete\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("create x --accelerator-type v5p-8 --node-count 300", "holds 1 to 256 slices"),
        ("create x --accelerator-type v5p-8 --node-count two", "--node-count two: expected"),
        ("create x --accelerator-type v5p-8 --accelerator-type v5p-16", "the same accelerator type"),
        ("create x --accelerator-type v5p-8,v6e-8", "the same accelerator type"),
        ("create x --accelerator-type v5p-9", "nearest that can be had"),
        ("create ../x --accelerator-type v5p-8", "name '../x'"),
        (
            "create x --accelerator-type v5p-8 --startup-script /nowhere",
            "--startup-script /nowhere: No such file",
        ),
        ("create x --accelerator-type v5p-8 --startup-script /dev/null", "is empty"),
        ("create x --accelerator-type v5p-8 --label a", "--label a: expected KEY=VALUE"),
        ("create x --accelerator-type v5p-8 --valid-until soon", "--valid-until soon"),
        ("create x --accelerator-type v5p-8 --reservation r", "needs --reserved"),
        (
            "create x --accelerator-type v5p-8 --reserved --reservation ../../x",
            "--reservation '../../x': expected",
        ),
        ("wait x --for ACTVE", "Did you mean 'ACTIVE'?"),
        ("wait x --timeout never", "--timeout never"),
        ("gc --owner a --all-owners", "exclude each other"),
        ("scp x only", "a source and a target"),
        ("scp x /nowhere/file :there", "/nowhere/file: there is no such file here"),
        ("scp x / :there", "/ is a folder: add --recursive"),
        ("scp x :there /nowhere/file", "/nowhere/file: there is no folder /nowhere here"),
        ("list --project my-project", "--zone or $SLICEWISE_ZONE is missing"),
        ("list --emulator /nowhere/at/all", "start one with 'slicewise emulator start'"),
    ],
)
def test_bad_input_of_qr_is_explained(run, words, said):
    code, out, err = run("qr", *words.split())
    assert (code, out) == (ExitCode.USER, "")
    assert said in err
    assert len(err.splitlines()) <= 2


def test_errors_of_the_api_end_with_their_own_codes(run, name):
    words = ("qr", "create", name, "--accelerator-type", "v5p-8", "--async")
    assert run(*words)[0] == 0
    assert run(*words)[0] == ExitCode.CONFLICT
    code, _, err = run("qr", "create", "other", "--accelerator-type", "v5p-64")
    assert (code, "Limit: 16" in err) == (ExitCode.QUOTA, True)
    code, _, err = run("qr", "create", f"{name}l", "--accelerator-type", "v6e-32", "--timeout", "200ms")
    assert (code, "goes on waiting" in err) == (ExitCode.TIMEOUT, True)
    assert run("qr", "delete", f"{name}l", "--force")[0] == 0


def test_ctrl_c_leaves_the_request_and_says_so(command, name):
    with command.popen("qr", "create", name, "--accelerator-type", "v6e-32") as process:
        for line in process.stderr:
            if "WAITING_FOR_RESOURCES" in line:
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"{name} stays: 'slicewise qr wait {name}' goes on waiting" in err
    assert f"slicewise qr delete {name} --force" in err


# ---------------------------------------------------------------- ssh: what gcloud's does wrong

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")


@needs_ssh
def test_more_workers_than_gclouds_largest_batch_pass_a_barrier(run, name, tmp_path):
    run("qr", "create", name, "--accelerator-type", "v5litepod-16", "--node-count", 17)
    mine = f"{tmp_path}/$(basename $(dirname $PWD))-$TPU_WORKER_ID"
    barrier = f"touch {mine}; until set -- {tmp_path}/*; [ $# -eq 68 ]; do sleep 0.2; done; echo past"
    code, out, _ = run("qr", "ssh", name, "--slice", "all", "--worker", "all", "--command", barrier)
    places = {f"s{s}w{w} | past" for s in range(17) for w in range(4)}
    assert (code, set(out.splitlines())) == (0, places)


@needs_ssh
def test_a_command_is_never_run_twice_and_its_code_comes_back(command, run, name):
    """gcloud takes 255 for a lost connection and runs the command again, up to ten times."""
    run("qr", "create", name, "--accelerator-type", "v5litepod-8", "--node-count", 2)
    again = "echo ran >> count; exit 255"
    assert command.run("qr", "ssh", name, "--command", again).returncode == 255
    both = ("qr", "ssh", name, "--slice", "all", "--command")
    code, out, err = run(*both, "cat count 2>/dev/null && exit 9; sleep 1; exit 3")
    assert (code, out) == (9, "s0w0 | ran\n")
    # the first failure in time decides, and is the last line
    assert err.splitlines()[-1] == "slicewise: slice 0 worker 0 ended with 9"
    code, _, err = run("qr", "ssh", name, "--slice", "all")
    assert (code, "2 workers need --command" in err) == (ExitCode.USER, True)


@needs_ssh
def test_long_lines_pass_and_a_reader_that_leaves_is_no_error(command, run, name, capfd):
    run("qr", "create", name, "--accelerator-type", "v5litepod-4", "--node-count", 2)
    both = ("qr", "ssh", name, "--slice", "all", "--command")
    code, out, err = run(*both, "head -c 3000000 /dev/zero | tr '\\0' x; printf end")
    assert (code, err) == (0, "")
    assert out.count("x") == 6_000_000
    assert out.count("end\n") == 2
    with command.popen(*both, "yes") as process:
        assert process.stdout.readline().endswith(" | y\n")
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_waiting_goes_on_until_every_slice_is_there_again(command, run, name):
    run("qr", "create", name, "--accelerator-type", "v5litepod-4", "--node-count", 2, "--spot")
    run("emulator", "inject", "preempt", f"{name}-1", "--hold", "1s")
    code, _, err = run("qr", "ssh", name, "--command", "true")
    assert (code, f"wait with 'slicewise qr wait {name}'" in err) == (ExitCode.NO_SLICES, True)
    code, out, err = run("qr", "wait", name)
    assert (code, out) == (0, f"{name}: ACTIVE\n")
    assert f"{name}: ACTIVE, 1 of 2 slices PREEMPTED for 0 s" in err
    assert len(err.splitlines()) < 8  # a line for each change, not for each look
    assert run("qr", "wait", name, "--timeout", "1s")[0] == 0
    code, _, err = run("qr", "delete", name)
    assert (code, "--force deletes one that has slices" in err) == (ExitCode.USER, True)


@needs_ssh
def test_files_are_copied_to_all_and_from_one(run, name, tmp_path, monkeypatch, directory):
    run("qr", "create", name, "--accelerator-type", "v5litepod-4", "--node-count", 2)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("text")
    assert run("qr", "scp", name, "--slice", "all", "--recursive", tmp_path / "folder", ":there")[0] == 0
    assert run("qr", "scp", name, "--slice", "1", ":there/file", tmp_path / "back")[0] == 0
    assert (tmp_path / "back").read_text() == "text"
    code, _, err = run("qr", "scp", name, "--slice", "all", ":there/file", tmp_path / "back")
    assert (code, "would overwrite each other's" in err) == (ExitCode.USER, True)
    code, _, err = run("qr", "scp", name, ":none", tmp_path / "none")
    assert (code, "ended with 1" in err) == (1, True)
    monkeypatch.chdir(tmp_path)  # a file's name may look like HOST:PATH, or like an option
    for odd in ("a:b", "-r"):
        (tmp_path / odd).write_text(odd)
        assert run("qr", "scp", name, "--", odd, ":odd")[0] == 0
        assert run("qr", "scp", name, ":odd", "back")[0] == 0
        assert (tmp_path / "back").read_text() == odd
    assert not [path for path in directory.parent.iterdir() if path != directory]  # no file of keys beside it


# ---------------------------------------------------------------- emulator


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("start --capacity v6e", "--capacity v6e: expected FAMILY=CHIPS"),
        ("start --capacity v5lite=8", "no family 'v5lite'. Did you mean 'v5litepod'?"),
        ("start --quota v6e=-1", "--quota v6e=-1: expected"),
        ("start --port 99999", "--port 99999: expected a port"),
        ("start --repair-state ACTIV", "Did you mean 'ACTIVE'?"),
        ("start --step slow", "--step slow"),
        ("inject explode x", "there is no fault 'explode'"),
        ("inject frieze x", "Did you mean 'freeze'?"),
        ("inject fail none-such", "There is no node 'none-such'"),
        ("inject fail x --hold long", "--hold long"),
        ("capacity v6e=lots", "capacity v6e=lots: expected"),
        ("status --state /nowhere/at/all", "no emulator is running in /nowhere/at/all"),
        ("stop --state /nowhere/at/all", "no emulator is running in /nowhere/at/all"),
    ],
)
def test_bad_input_of_emulator_is_explained(run, words, said):
    code, out, err = run("emulator", *words.split())
    assert (code, out) == (ExitCode.USER, "")
    assert said in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_a_second_emulator_in_one_folder_is_a_conflict(run, more):
    code, out, err = run("emulator", "start", *more)
    assert (code, out) == (ExitCode.CONFLICT, "")
    assert "an emulator is already running in" in err
    assert "--state DIR starts another" in err


def test_a_folder_that_cannot_hold_an_emulator_is_wrong_input(run, tmp_path):
    (tmp_path / "file").write_text("")
    for more in ([], ["--detach"]):
        code, out, err = run("emulator", "start", "--state", f"{tmp_path}/file/state", *more)
        assert (code, out) == (ExitCode.USER, "")
        assert f"the state directory {tmp_path}/file/state cannot be written: Not a directory" in err


def test_faults_capacity_and_status_through_the_command(run, name):
    run("qr", "create", name, "--accelerator-type", "v6e-4", "--node-count", 2, "--spot")
    status = json.loads(run("emulator", "status", "--json")[1])
    assert (status["used"]["v6e"], status["capacity"]["v6e"]) == (8, 16)
    assert run("emulator", "capacity", "v6e=4")[0] == 0
    out = run("emulator", "inject", "preempt", f"{name}-1")[1]
    assert out == f"preempt: projects/emulated/locations/local-a/nodes/{name}-1\n"
    out = run("emulator", "status")[1]
    assert f"{name}-1: PREEMPTED" in out
    assert "v6e: 4 chips in use of 4" in out
    run("emulator", "capacity", "v6e=16")
    run("emulator", "inject", "partition", f"{name}-0")
    assert f"{name}-0: READY, partitioned" in run("emulator", "status")[1]
    assert run("emulator", "inject", "heal", f"{name}-0")[0] == 0
    assert run("emulator", "inject", "maintain", f"{name}-0", "--after", "1h")[0] == 0
    assert "maintenance from" in run("qr", "describe", name)[1]


def test_ctrl_c_ends_an_emulator_and_all_that_it_runs(command, tmp_path, run):
    state = tmp_path / "other"
    with command.popen("emulator", "start", "--state", str(state), "--step", "0.01") as process:
        announced = process.stdout.readline()
        assert announced.startswith("emulator: REST http://127.0.0.1:")
        assert announced.endswith(f"state in {state}\n")
        started = tmp_path / "script.sh"
        started.write_text(f"echo $$ > {tmp_path}/pid; exec sleep 1000")
        words = (
            "--accelerator-type",
            "v5litepod-4",
            "--emulator",
            str(state),
            "--startup-script",
            str(started),
        )
        assert run("qr", "create", "x", *words)[0] == 0
        deadline_s = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert sorted(p.name for p in state.iterdir()) == [".gitignore", "lock"]


def test_a_taken_port_is_refused(run, directory, tmp_path):
    port = local.running(directory).rest.rpartition(":")[2]
    code, _, err = run("emulator", "start", "--state", tmp_path / "s", "--port", port)
    assert (code, f"port {port} cannot be used" in err) == (ExitCode.USER, True)
    port = local.running(directory).grpc.rpartition(":")[2]
    code, _, err = run("emulator", "start", "--state", tmp_path / "s", "--grpc-port", port)
    assert (code, f"port {port} cannot be used" in err) == (ExitCode.USER, True)


@pytest.mark.parametrize(
    ("module", "verb", "extra"), [("google.cloud", "qr", "cloud"), ("aiohttp", "emulator", "emulator")]
)
def test_a_missing_extra_is_named(module, verb, extra, tmp_path):
    words = {"qr": ["qr", "list"], "emulator": ["emulator", "start", "--state", str(tmp_path)]}[verb]
    script = (
        "import sys; from importlib.abc import MetaPathFinder\n"
        "class Hide(MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)\n"
        "sys.meta_path.insert(0, Hide()); from slicewise.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.USER
    assert f"pip install 'slicewise[{extra}]'" in done.stderr
