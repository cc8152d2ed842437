"""What of the library's errors is damage to a step, and what is the storage."""

import errno

import pytest

from slicewise.checkpoint import backend


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (FileNotFoundError(errno.ENOENT, "gone"), True),
        (PermissionError(errno.EACCES, "no"), False),
        (OSError(errno.EIO, "broken"), False),
        (ValueError("DATA_LOSS: checksum"), True),
        (ValueError("Error reading: os_error_code='5'"), False),
        (ValueError("UNAVAILABLE: 503"), False),
        (KeyError("state"), True),
    ],
)
def test_what_is_damage_and_what_is_the_storage(error, is_damage):
    outer = RuntimeError("could not load")
    outer.__cause__ = error
    assert backend._is_damage(outer) is is_damage
