"""slicewise tune as a user runs it on a machine without an accelerator."""

import json

import jax
import pytest

from slicewise import cli
from slicewise.errors import ExitCode
from slicewise.kernels import tuned
from slicewise.parallel import cluster

SMALL = ["model=demo-tiny", "sequence_length=128", "global_batch_size=8", "attention=xla_chunked"]


@pytest.fixture(autouse=True)
def in_this_process(tmp_path, monkeypatch):
    """With a table of its own, on one device."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "as JAX is configured already")
    monkeypatch.setattr(cluster, "initialize", lambda: None)
    monkeypatch.setattr(cluster, "found", lambda: cluster.by_slice(jax.devices()[:1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "kernles"], "--only kernles: expected some of kernels, flags, remat"),
        (["--only", ""], "--only '': expected some of kernels, flags, remat"),
        (["--write", "absent/run.toml"], "there is no folder"),
        (["--minutes", "soon"], "--minutes soon: expected"),
        (["--minutes", "0"], "--minutes 0: expected minutes above 0, such as 20"),
        (["--minutes", "20T"], "--minutes 20T: expected minutes above 0"),
        (["--chip", "v6e"], "absent slices need --chip and --topology"),
        (["--topology", "4x4"], "absent slices need --chip and --topology"),
        (["--slices", "2"], "--slices is for absent slices"),
        (["--chip", "h100", "--topology", "8"], "no compiler here makes programs for h100"),
        (["--chip", "v6e", "--topology", "3x3"], "v6e has no 3x3 slice"),
        (["remat_policy=most", "--only", "kernels"], "remat_policy = 'most'"),
    ],
)
def test_bad_input_is_a_sentence(arguments, message, capsys):
    assert cli.main(["tune", *arguments]) == ExitCode.USER
    assert message in capsys.readouterr().err


def test_says_so_where_nothing_can_be_tuned(capsys):
    assert cli.main(["tune", "--only", "kernels,flags,kernels"]) == ExitCode.DONE
    assert "nothing to tune: kernels and flags have no settings on cpu" in capsys.readouterr().out


def test_blocks_of_attention_are_timed_here_and_used_from_then_on(capsys, tmp_path):
    """128 tokens have one block only: one trial, and the same command again knows it."""
    for _ in range(2):
        assert cli.main(["tune", *SMALL, "--only", "kernels", "--json"]) == ExitCode.DONE
        found = json.loads(capsys.readouterr().out)
        assert [t["setting"] for t in found["trials"]] == ["128"]
        assert found["skipped"] == 0
    (entry,) = tuned.own()
    assert (entry.key.chip, entry.judge, entry.values) == ("cpu", "measured", {"block": 128})
    assert tuned.find(entry.key, ("block",)) == {"block": 128}
