"""What all verbs have in common."""

import pytest

from slicewise import cli
from slicewise.errors import ExitCode


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train --local -2x2x1", "--local '-2x2x1'"),
        (
            "plan --model llama3-8b --chip v5p --topology -2x2 --seq 8k --batch-tokens 4M",
            "'-2x2' is not a slice",
        ),
        (
            "plan --model llama3-8b --chip v5p --topology 2x2x1 --seq -8k --batch-tokens 4M",
            "--seq -8k: expected",
        ),
        (
            "qr create x --accelerator-type v5p-8 --node-count -2x",
            "--node-count -2x: expected a whole number",
        ),
        ("emulator start --step -5s", "--step -5s: expected"),
        ("flags list --chip -5p", "unknown chip '-5p'"),
    ],
)
def test_a_value_that_begins_with_a_minus_is_judged_as_a_value(capsys, command, said):
    assert cli.main(command.split()) == ExitCode.USER
    shown = capsys.readouterr().err
    assert said in shown
    assert "usage:" not in shown
