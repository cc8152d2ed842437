"""What tests of several folders ask about processes. On the path of every test: pyproject.toml."""

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether process ``pid`` runs or can run again: one that has ended and is not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # also while it is read
        return False
