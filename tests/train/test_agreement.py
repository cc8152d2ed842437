"""A common step of processes that are not in step; the coordination service is a dictionary, processes are threads."""

import random
import threading
import time

import pytest
from jax.errors import JaxRuntimeError

from slicewise.train import agreement
from slicewise.train.agreement import SAVE, STOP, Agreement, Point


class Service:
    """What a client of the coordination service does, for ``processes`` threads."""

    def __init__(self, processes):
        self.processes, self.values, self.barriers = processes, {}, {}
        self.lock = threading.Lock()
        self.is_broken = False

    def key_value_set(self, key, value):
        with self.lock:
            if key in self.values:
                raise JaxRuntimeError("ALREADY_EXISTS")
            self.values[key] = value

    def key_value_try_get(self, key):
        with self.lock:
            if key not in self.values:
                raise JaxRuntimeError("NOT_FOUND")
            return self.values[key]

    def key_value_dir_get(self, key):
        with self.lock:
            return [(k, v) for k, v in self.values.items() if k.startswith(key)]

    def wait_at_barrier(self, name, timeout_ms):
        if self.is_broken:
            raise JaxRuntimeError("UNAVAILABLE")
        with self.lock:
            barrier = self.barriers.setdefault(name, threading.Barrier(self.processes))
        barrier.wait(10)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(agreement, "POLL_S", 0.005)


class Run:
    """Processes that step side by side, up to two steps apart, as the results of steps keep them."""

    def __init__(self, processes, ask):
        service = Service(processes)
        self.done = [0] * processes
        self.met = [[] for _ in range(processes)]  # (step before which, what)
        self.agreements = [Agreement(service, p, processes) for p in range(processes)]
        threads = [threading.Thread(target=self.step, args=(p, ask)) for p in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for one in self.agreements:
            one.close()

    def step(self, process, ask):
        pace = random.Random(process)
        for number in range(1, 3000):
            while number - 2 > min(self.done):
                time.sleep(0.0002)
            due = self.agreements[process].begin()
            self.met[process] += [(number, point.what) for point in due]
            if any(point.what == STOP for point in due):
                self.done[process] = 10**9
                return
            ask(self, process, number)
            time.sleep(pace.random() * 0.002)
            self.done[process] = number


@pytest.mark.parametrize("seed", range(3))
def test_all_stop_at_the_same_step_whoever_was_asked_and_whenever(seed):
    chosen = random.Random(seed)
    who, when = chosen.randrange(3), chosen.randrange(1, 20)

    def ask(run, process, number):
        if (process, number) == (who, when):
            run.agreements[process].request(STOP, "asked")

    run = Run(3, ask)
    assert run.met[0] == run.met[1] == run.met[2]
    assert [what for _, what in run.met[0]] == [STOP]
    assert run.met[0][0][0] > when


def test_requests_of_several_at_once_are_all_met_once_each():
    def ask(run, process, number):
        if number == 5:
            run.agreements[process].request(SAVE if process == 0 else STOP, f"from {process}")
        elif number == 2 and process == 1:
            run.agreements[process].request(SAVE, "early")

    run = Run(2, ask)
    assert run.met[0] == run.met[1]
    kinds = [what for _, what in run.met[0]]
    assert kinds[0] == SAVE
    assert kinds.count(STOP) == 1
    last = run.met[0][-1][0]
    assert (last, STOP) in run.met[0]


def test_a_lone_process_agrees_with_itself_before_its_next_step():
    heard = []
    alone = Agreement(heard=heard.append)
    assert alone.begin() == []
    alone.request(SAVE, "the clock")
    assert heard == [Point(SAVE, "the clock", 1)]
    assert alone.begin() == heard
    alone.request(STOP, "SIGTERM")
    assert [point.why for point in alone.begin()] == ["SIGTERM"]
    assert alone.begin() == []
    alone.close()


def test_a_stop_before_any_step_is_known_as_such():
    heard = []
    service = Service(2)
    both = [Agreement(service, p, 2, heard.append) for p in range(2)]
    both[1].request(STOP, "SIGTERM")
    deadline_s = time.monotonic() + 10
    while len(heard) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert heard == [Point(STOP, "SIGTERM", 0)] * 2
    for one in both:
        one.close()


def test_a_service_that_is_gone_ends_the_watching_and_holds_up_nobody():
    service = Service(2)
    service.is_broken = True
    one = Agreement(service, 0, 2)
    one.request(STOP, "SIGTERM")
    assert one.begin() == []
    one.close()
