import json
import os
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from slicewise.errors import ExitCode, UserError
from slicewise.train import metrics
from slicewise.train.metrics import MetricWriter, make_directory, peak_flops_per_s


def write(folder, steps, *, from_step=0, **options):
    with MetricWriter(folder, from_step=from_step, **{"tensorboard": False, **options}) as writer:
        for step in steps:
            writer.write(step, {"loss": 1 / step})


def steps_in(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def redirect(device, file):
    """What is written to ``file`` from now on goes to ``device``."""
    fd = os.open(device, os.O_WRONLY)
    os.dup2(fd, file.fileno())
    os.close(fd)


# ---------------------------------------------------------------- records


def test_each_record_is_a_line_with_its_step(tmp_path):
    write(tmp_path, [1, 2])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


def test_a_record_is_in_the_file_at_once(tmp_path):
    with MetricWriter(tmp_path, from_step=0, tensorboard=False) as writer:
        writer.write(1, {"loss": 1.0})
        assert steps_in(tmp_path) == [1]


def test_resuming_drops_the_records_of_lost_steps_and_keeps_the_others(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5])
    write(tmp_path, [4, 5, 6], from_step=3)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("cut", ['{"step": 3, "lo', '{"step": 3}', "\0\0\0\n", '{"loss": 1}\n', "3\n"])
def test_a_line_that_a_crash_cut_off_or_spoilt_is_dropped(tmp_path, cut):
    write(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(cut)
    write(tmp_path, [3], from_step=2)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_opening_only_cuts_the_file_in_place_so_that_no_kill_can_lose_what_is_kept(tmp_path):
    write(tmp_path, [1, 2, 3])
    with (tmp_path / "metrics.jsonl").open() as before:
        write(tmp_path, [], from_step=2)
        assert before.read().count("step") == 2
    assert steps_in(tmp_path) == [1, 2]


def test_a_disk_that_is_full_is_one_sentence_about_the_environment(tmp_path, monkeypatch):
    with MetricWriter(tmp_path, from_step=0, tensorboard=False) as writer:
        writer.write(1, {"loss": 1.0})
        redirect("/dev/full", writer._file)
        with pytest.raises(UserError, match=r"metrics.jsonl cannot be written: No space left") as caught:
            writer.write(2, {"loss": 1.0})
    assert caught.value.code == ExitCode.INTERNAL
    assert steps_in(tmp_path) == [1]


def test_a_folder_that_cannot_be_made_is_one_sentence_about_the_environment(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file.* cannot be written: Not a directory") as caught:
        make_directory(tmp_path / "file" / "run")
    assert caught.value.code == ExitCode.INTERNAL


# ---------------------------------------------------------------- TensorBoard


def test_event_files_hold_every_value_and_hide_the_steps_that_were_lost(tmp_path, events):
    write(tmp_path, [1, 2, 3], tensorboard=True)
    write(tmp_path, [3], from_step=2, tensorboard=True)
    assert events(tmp_path) == [
        (1, "start"),
        (1, {"loss": 1.0}),
        (2, {"loss": 0.5}),
        (3, {"loss": pytest.approx(1 / 3)}),
        (3, "start"),
        (3, {"loss": pytest.approx(1 / 3)}),
    ]


def test_events_can_be_read_after_a_flush_or_a_while(tmp_path, monkeypatch, events):
    with MetricWriter(tmp_path, from_step=0, tensorboard=True) as writer:
        writer.write(1, {"loss": 1.0})
        writer.flush()
        assert events(tmp_path)[-1] == (1, {"loss": 1.0})
        monkeypatch.setattr(metrics, "EVENTS_FLUSH_S", 0.0)
        writer.write(2, {"loss": 1.0})
        until_s = time.monotonic() + 30
        while events(tmp_path)[-1] != (2, {"loss": 1.0}):
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_events_on_a_full_disk_are_one_sentence_and_no_hang(tmp_path):
    writer = MetricWriter(tmp_path, from_step=0, tensorboard=True)
    writer.write(0, {"loss": 1.0})
    writer.flush()
    file = writer._events._file._py_recordio_writer._writer
    redirect("/dev/full", file)

    def write_much():
        for step in range(1, 10_000):
            writer.write(step, {"loss": 1.0})

    with pytest.raises(UserError, match=r"tensorboard cannot be written: No space left") as caught:
        write_much()
    assert caught.value.code == ExitCode.INTERNAL
    with pytest.raises(UserError, match="No space left"):
        writer.close()
    redirect("/dev/null", file)
    file.close()


# ---------------------------------------------------------------- figures


def test_the_peak_of_a_device_is_measured_where_none_is_published():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    assert 1e8 < peak_flops_per_s(mesh) < 1e13


def test_the_peak_of_a_chip_of_the_catalog_is_its_devices_share():
    for kind, expected in (
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU7x", 1.15e15),
    ):
        device = SimpleNamespace(device_kind=kind)
        mesh = SimpleNamespace(devices=np.array([device], dtype=object))
        assert peak_flops_per_s(mesh) == pytest.approx(expected, rel=0.01)
