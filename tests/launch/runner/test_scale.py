"""More workers than any batch: all of them start at once, or a command that waits for the others never ends."""

import pytest

pytestmark = pytest.mark.multiprocess
BARRIER = "touch $B/$SLICEWISE_PROCESS_ID; while [ $(ls $B | wc -l) -lt $SLICEWISE_NUM_PROCESSES ]; do sleep .2; done"


def test_a_barrier_over_96_workers_is_passed(many, tmp_path):
    target = many(8, 12)
    barrier = tmp_path / "barrier"
    barrier.mkdir()
    code, text = target.run(
        "sh", "-c", BARRIER, environment={"B": str(barrier)}, timing={"heartbeat_s": 5.0, "silence_s": 60.0}
    )
    assert code == 0, text
    assert "connected to 96 workers of 8 slices" in text
    assert "all 96 workers done" in text
    assert len(list(barrier.iterdir())) == 96
