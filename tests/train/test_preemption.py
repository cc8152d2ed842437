"""Notices of a preemption, in processes of their own that need no JAX."""

import http.server
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from slicewise.errors import ExitCode
from slicewise.train import preemption
from slicewise.train.preemption import NOT_SAVED, Preemption

SCRIPT = """
import os, sys, time
from slicewise.train.preemption import Preemption

class Agreement:
    def request(self, what, why):
        print("asked to", what, "for", why, flush=True)

class Report:
    def __call__(self, event):
        print(event["text"], flush=True)
    def close(self):
        print("closed", flush=True)

with Preemption() as preemption:
"""


@pytest.fixture
def started(tmp_path):
    """Starts a body inside the context, and waits until it says that it is ready."""
    processes = []

    def start(body, **environment):
        body = textwrap.indent(textwrap.dedent(body), "    ")
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT + body],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": ":".join(sys.path), **environment},
        )
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


ATTACHED = """
preemption.attach(Agreement(), {grace_s}, Report())
print("ready", flush=True)
time.sleep(60)
"""


def test_before_there_is_anything_to_save_it_leaves_at_once(started):
    process = started("print('ready', flush=True)\ntime.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == ExitCode.PREEMPTED
    assert process.stderr.read() == "SIGTERM before the first step: stops, with nothing to save\n"


def test_also_while_the_main_thread_is_in_a_library(started):
    process = started("""
        import hashlib
        print("ready", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as in a compiler: no handler of Python's runs
    """)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == ExitCode.PREEMPTED


def test_a_second_signal_ends_it_at_once(started):
    process = started(ATTACHED.format(grace_s=60))
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM: saves and stops, within 60 s\n"
    assert process.stdout.readline() == "asked to stop for SIGTERM\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == NOT_SAVED == 143
    assert process.stdout.read() == "closed\n"


def test_the_end_of_the_grace_ends_it(started):
    process = started(ATTACHED.format(grace_s=0.2))
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == NOT_SAVED
    assert "could not save within 0.2 s" in process.stdout.read()


def test_agreed_before_any_step_it_leaves_at_once_and_afterwards_it_has_the_grace(started):
    heard = """
    from slicewise.train.agreement import Point
    preemption.attach(Agreement(), 0.2, Report())
    print("ready", flush=True)
    preemption.heard(Point("save", "a clock", 0))
    preemption.heard(Point("stop", "SIGTERM elsewhere", {begun}))
    time.sleep(60)
    """
    process = started(heard.format(begun=0))
    assert process.wait(20) == ExitCode.PREEMPTED
    assert (
        process.stdout.read()
        == "SIGTERM elsewhere before the first step: stops, with nothing to save\nclosed\n"
    )
    assert started(heard.format(begun=3)).wait(20) == NOT_SAVED


def test_afterwards_the_signal_does_what_it_did_before(started):
    process = started("preemption.close()\nprint('ready', flush=True)\ntime.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM


def test_outside_the_main_thread_nothing_is_changed():
    handler = signal.getsignal(signal.SIGTERM)

    def enter():
        with Preemption():
            assert signal.getsignal(signal.SIGTERM) == handler

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    with Preemption():
        assert signal.getsignal(signal.SIGTERM) != handler
    assert signal.getsignal(signal.SIGTERM) == handler


class Metadata(http.server.BaseHTTPRequestHandler):
    values: dict = {}  # noqa: RUF012

    def do_GET(self):
        assert self.headers["Metadata-Flavor"] == "Google"
        value = self.values.get(self.path.removeprefix("/computeMetadata/v1/instance/"))
        self.send_response(200 if value else 404)
        self.end_headers()
        self.wfile.write((value or "").encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def metadata():
    """A metadata server: its address, and the values that it serves."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        Metadata.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"127.0.0.1:{server.server_port}", Metadata.values
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("values", "notice"),
    [
        ({}, ""),
        ({"preempted": "TRUE"}, "the platform preempts this machine"),
        ({"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, "maintenance of this machine (TERMINATE"),
        ({"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}, ""),
        ({"preempted": "", "maintenance-event": ""}, ""),
    ],
)
def test_what_the_metadata_server_says_is_a_notice_or_not(metadata, values, notice):
    server, served = metadata
    served.update(values)
    said = preemption.notice_at(server)
    assert said.startswith(notice)
    assert bool(said) == bool(notice)


def test_a_metadata_server_that_does_not_answer_is_no_notice():
    assert preemption.notice_at("127.0.0.1:9") == ""


def test_a_notice_in_the_metadata_is_as_good_as_a_signal(started, metadata):
    server, served = metadata
    process = started(ATTACHED.format(grace_s=60), GCE_METADATA_HOST=server)
    served["preempted"] = "TRUE"
    assert "the platform preempts this machine: saves and stops" in process.stdout.readline()
    assert process.stdout.readline() == "asked to stop for the platform preempts this machine\n"
    process.send_signal(signal.SIGTERM)  # the platform's own: the first, so it may go on saving
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)


def test_only_machines_of_google_have_a_metadata_server(monkeypatch, tmp_path):
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(preemption, "_PRODUCT", tmp_path / "none")
    assert preemption.metadata_server() is None
    monkeypatch.setattr(preemption, "_PRODUCT", tmp_path / "product")
    (tmp_path / "product").write_text("Google Compute Engine\n")
    assert preemption.metadata_server() == "169.254.169.254"
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:8")
    assert preemption.metadata_server() == "127.0.0.1:8"
