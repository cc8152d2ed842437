"""What all verbs have in common."""

import pytest

from slicewise import cli
from slicewise.errors import ExitCode


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("qr create x", "the following arguments are required: --accelerator-type"),
        ("qr create x --accelerator-type v5p-8 --spot --reserved", "not allowed with argument --spot"),
        ("qr frob", "invalid choice: 'frob'"),
        ("job submit run.toml --target frob", "invalid choice: 'frob'"),
        ("run --on hosts.toml --devices x -- true", "argument --devices: invalid int value: 'x'"),
        ("qr list --frob", "unrecognized arguments: --frob"),
        ("", "the following arguments are required: VERB"),
    ],
)
def test_a_line_that_does_not_parse_is_answered_in_a_line(capsys, command, said):
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    shown = capsys.readouterr().err
    assert (ended.value.code, said in shown) == (ExitCode.USER, True)
    assert shown.startswith("slicewise: ")
    assert "--help' explains it." in shown
    assert len(shown.splitlines()) == 1


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
        ("flags list --chip=", "unknown chip ''"),
        ("flags explain --xla_tpu_frob=true", "unknown group or flag 'xla_tpu_frob'"),
    ],
)
def test_a_value_that_begins_with_a_minus_is_judged_as_a_value(capsys, command, said):
    assert cli.main(command.split()) == ExitCode.USER
    shown = capsys.readouterr().err
    assert said in shown
    assert "usage:" not in shown


@pytest.mark.parametrize("dashes", ["", "-", "--"])
@pytest.mark.parametrize("value", ["", "=65536", "=-1"])
def test_a_flag_is_explained_as_it_is_pasted(capsys, dashes, value):
    name = "xla_tpu_scoped_vmem_limit_kib"
    assert cli.main(["flags", "explain", f"{dashes}{name}{value}"]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith(f"{name}\n")


def test_an_option_that_a_verb_lacks_is_no_pasted_flag(capsys):
    with pytest.raises(SystemExit):
        cli.main(["flags", "explain", "scheduler", "--frob"])
    assert "unrecognized arguments: --frob" in capsys.readouterr().err
