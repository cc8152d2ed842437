import json
import socket
import sys
import threading

import pytest

from slicewise.errors import UserError
from slicewise.launch.preflight import MARK, Answer, Expectations, Report, problems
from slicewise.launch.workers import Worker
from slicewise.train import preflight as probe

GOOD = {
    "host": {"versions": {"python": "3.12.1", "jax": "0.12.0"}, "free_bytes": {"/": 1e11}, "holders": []},
    "network": {"coordinator": "", "checkpoint": ""},
    "devices": {"count": 4, "kind": "TPU v5p", "platform": "tpu", "slices": [0], "all_reduce": []},
}


def answer(index, ahead_s=0.0, ending="", tail=(), **changes):
    """Of one of two slices of four; ``devices_count=3`` changes one value of GOOD."""
    said = json.loads(json.dumps(GOOD))
    said["devices"]["slices"] = [index // 4]
    for key, value in changes.items():
        part, _, name = key.partition("_")
        said[part][name] = value
    worker = Worker(index // 4, index % 4, f"h{index}", 22, "u", None, None)
    return Answer(worker, ahead_s, 0.01, **said, ending=ending, tail=tail)


def judged(odd, expected=Expectations(), index=6, **changes):  # noqa: B008  frozen
    answers = [answer(i) if i != index else answer(i, **odd) for i in range(8)]
    return problems(answers, expected)


def test_workers_that_agree_and_are_as_expected_have_no_problem():
    assert judged({}) == []
    assert judged({}, Expectations(chip="v5p", devices=4)) == []


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"devices_count": 3}, "devices is 3, should be 4, as on 7 of 8 workers"),
        ({"devices_kind": "TPU v4"}, "chip is TPU v4, should be TPU v5p, as on 7 of 8 workers"),
        ({"devices_slices": [0]}, "its devices are of slice 0, should be of slice 1"),
        (
            {"host_versions": {"python": "3.12.1"}},
            "version of jax is absent, should be 0.12.0, as on 7 of 8 workers",
        ),
        ({"ahead_s": 3.0}, "its clock is 3.0 s ahead of ours, should be within 1 s"),
        ({"ahead_s": -3.0}, "its clock is 3.0 s behind ours, should be within 1 s"),
        ({"host_free_bytes": {"/data": 2e9}}, "/data has 2.0 GB free, should have 5 GB"),
        ({"host_holders": [7, 8]}, "its accelerators are held by pid 7, 8, should be free; end that process"),
        ({"network_coordinator": "cannot reach h0:8482"}, "coordinator: cannot reach h0:8482"),
        (
            {"network_checkpoint": "FileNotFoundError: x"},
            "checkpoint path None: FileNotFoundError: x; should be one",
        ),
        ({"devices_problem": "RuntimeError: no TPU"}, "devices: RuntimeError: no TPU"),
        ({"ending": "was lost: x", "tail": ["why"]}, "preflight was lost: x\n  why"),
    ],
)
def test_a_mismatch_names_the_worker_and_what_it_should_have_been(odd, text):
    (found,) = judged(odd)
    assert found.startswith(f"slice 1 worker 2 (h6): {text}")


def test_what_is_expected_outranks_what_most_workers_have():
    (found,) = judged({"devices_count": 8}, Expectations(devices=8))
    assert found == "slice 0 workers 0-3, slice 1 workers 0, 1, 3 (h0): devices is 4, should be 8"
    (found,) = judged({}, Expectations(chip="v4"), index=9)
    assert "chip is 'TPU v5p', should be v4 (TPU v4)" in found


def test_a_clock_is_only_judged_as_well_as_it_is_known():
    assert problems([Answer(answer(0).worker, 3.0, 5.0, **GOOD)], Expectations()) == []


def test_the_report_shows_each_thing_once_and_is_kept_as_json():
    timed = {"network": "DCN", "members": 2, "bytes": 1 << 20, "seconds": 0.01}
    report = Report([answer(i, devices_all_reduce=[timed]) for i in range(8)], ["p"])
    lines = report.table()
    assert "devices    8 workers: 4 x TPU v5p" in lines
    assert "network    8 of 8 workers met at the coordinator" in lines
    assert lines[-1] == "all-reduce DCN, 2 devices, 1 MiB each: 10.00 ms, 0.10 GB/s a device"
    assert json.loads(report.as_json())["workers"][7]["worker"]["worker_index"] == 3


def test_both_sides_have_the_same_mark():
    assert probe.MARK == MARK


# ---------------------------------------------------------------- what runs on workers


def meet(monkeypatch, ranks, checkpoint, wait_s=5.0, late=()):
    """What each rank would say; those in ``late`` never come."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("SLICEWISE_COORDINATOR", f"127.0.0.1:{port}")
    said = {}

    def one(rank):
        order = {"checkpoint": str(checkpoint) if checkpoint else None, "run": "r", "wait_s": wait_s}
        said[rank] = probe.meet(rank, ranks, order)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks) if rank not in late]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def test_all_meet_at_the_coordinator_and_see_one_file_which_is_gone_then(monkeypatch, tmp_path):
    said = meet(monkeypatch, 5, tmp_path / "new")
    assert said == {rank: {"coordinator": "", "checkpoint": ""} for rank in range(5)}
    assert list((tmp_path / "new").iterdir()) == []


def test_one_that_does_not_come_is_missed_by_all(monkeypatch):
    said = meet(monkeypatch, 4, None, wait_s=0.5, late=(2,))
    assert "1 of 3 other workers did not reach port" in said[0]["coordinator"]
    assert said[1]["coordinator"] == said[3]["coordinator"] == "others did not reach the coordinator"


def test_an_absent_coordinator_is_named(monkeypatch):
    said = meet(monkeypatch, 2, None, wait_s=0.3, late=(0,))
    assert "cannot reach 127.0.0.1:" in said[1]["coordinator"]


def test_a_checkpoint_path_that_is_not_shared_or_not_writable_is_found(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    said = meet(monkeypatch, 2, tmp_path / "file" / "x")
    assert said[0]["checkpoint"].startswith("NotADirectoryError")
    assert said[1]["checkpoint"]
    real = probe.write
    monkeypatch.setattr(probe, "write", lambda path, text: real(path, "of another run"))
    said = meet(monkeypatch, 2, tmp_path)
    assert "something else" in said[1]["checkpoint"]


def test_an_object_store_without_its_library_is_a_problem_and_no_crash(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    said = meet(monkeypatch, 1, "gs://bucket/x".replace("//", "//"))
    assert said[0]["checkpoint"] == "cannot be checked without fsspec; install it on the workers"


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (Expectations(chip="v5q"), "v5q"),
        (Expectations(devices=0), "--devices 0: expected 1 or more"),
        (Expectations(min_free_bytes=-1e9), "--min-free -1: expected 0 GB or more"),
        (Expectations(min_free_bytes=float("nan")), "--min-free nan"),
    ],
)
def test_expectations_that_nothing_can_meet_are_refused_at_once(expected, message):
    with pytest.raises(UserError, match=message):
        expected.check()
