"""Whether the kernel killed a process of this machine because memory had run out: it leaves a count, and no word."""

from pathlib import Path

_COUNTS = Path("/proc/vmstat")
ADVICE = (
    "the kernel ended a process of this machine just then because memory had run out: lower global_batch_size or"
    " sequence_length, choose a smaller model, or emulate fewer devices"
)


def count() -> int:
    """How many processes it has killed for that since the machine started; 0 where it does not say."""
    try:
        lines = _COUNTS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
