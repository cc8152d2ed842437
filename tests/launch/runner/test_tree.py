import os
import subprocess
import zlib

import pytest

from slicewise.errors import UserError
from slicewise.launch.runner import agent_tree
from slicewise.launch.runner import tree as tree_module
from slicewise.launch.runner.tree import read_tree


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.py").write_text("a")
    (folder / "sub" / "b.sh").write_text("b")
    (folder / "sub" / "b.sh").chmod(0o755)
    (folder / ".gitignore").write_text("*.log\n/data/\n")
    (folder / "x.log").write_text("big")
    (folder / "data").mkdir()
    (folder / "data" / "shard").write_text("big")
    (folder / "link").symlink_to("a.py")
    return folder


def git(folder, *arguments):
    command = ["git", "-C", folder, "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    subprocess.run(command, check=True, capture_output=True)


def modes(tree):
    return {path: mode for path, mode, _, _ in tree.entries}


EXPECTED = {".gitignore": "file", "a.py": "file", "link": "link", "sub/b.sh": "exec"}


def test_what_git_ignores_is_not_shipped_with_or_without_a_repository(folder):
    assert modes(read_tree(folder)) == EXPECTED
    git(folder, "init", "-q")
    assert modes(read_tree(folder)) == EXPECTED
    assert modes(read_tree(folder / "sub")) == {"b.sh": "exec"}


def test_tracked_files_count_though_ignored_and_deleted_ones_do_not(folder):
    git(folder, "init", "-q")
    git(folder, "add", "-f", "x.log", "a.py")
    (folder / "a.py").unlink()
    assert modes(read_tree(folder)) == {k: v for k, v in EXPECTED.items() if k != "a.py"} | {"x.log": "file"}


def test_a_repository_inside_is_shipped_by_its_own_rules(folder):
    git(folder, "init", "-q")
    inner = folder / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "kept").write_text("1")
    (inner / "dropped").write_text("1")
    (inner / ".gitignore").write_text("dropped\n")
    expected = EXPECTED | {"inner/.gitignore": "file", "inner/kept": "file"}
    assert modes(read_tree(folder)) == expected
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "inner")
    git(folder, "-c", "advice.addEmbeddedRepo=false", "add", "inner")
    assert modes(read_tree(folder)) == expected


def test_the_digest_depends_on_content_and_mode_and_on_nothing_else(folder):
    first = read_tree(folder).digest
    os.utime(folder / "a.py", (1, 1))
    assert read_tree(folder).digest == first
    (folder / "a.py").chmod(0o755)
    second = read_tree(folder).digest
    (folder / "a.py").write_text("c")
    assert len({first, second, read_tree(folder).digest}) == 3


def test_forgotten_data_is_named(folder, monkeypatch):
    monkeypatch.setattr(tree_module, "MAX_TREE_BYTES", 100)
    (folder / "weights").write_bytes(bytes(200))
    with pytest.raises(UserError, match=r"Add data to .gitignore; the largest: weights"):
        read_tree(folder)


def test_keys_and_vms_of_an_emulator_in_the_folder_are_not_shipped(tmp_path):
    from slicewise.launch.emulator.local import make_directory, private_file

    (tmp_path / "train.py").write_text("")
    make_directory(tmp_path / "emulator")
    private_file(tmp_path / "emulator" / "id_ed25519", "a private key")
    assert [entry[0] for entry in read_tree(tmp_path).entries] == ["train.py"]
    make_directory(tmp_path)  # one that was there is left as it was
    assert not (tmp_path / ".gitignore").exists()


def test_without_git_it_says_so(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(UserError, match="git is needed"):
        read_tree(folder)


def test_a_file_that_changes_while_it_is_shipped_is_refused(folder):
    tree = read_tree(folder)
    (folder / "a.py").write_text("later")
    with pytest.raises(UserError, match=r"a\.py changed while it was shipped"):
        list(tree.batches(["a.py"]))


def arrive(tree, there, paths=None):
    for batch in tree.batches(modes(tree) if paths is None else paths):
        there.unpack(zlib.decompress(batch))
    there.finish(tree.digest, [list(entry) for entry in tree.entries])


def test_a_tree_arrives_whole_and_then_only_what_changed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tree_module, "BATCH_BYTES", 2)  # every file a batch
    there = agent_tree.Tree(str(tmp_path / "there"))
    tree = read_tree(folder)
    assert there.lacks(tree.digest, None) is True
    assert sorted(there.lacks(tree.digest, tree.entries)) == sorted(EXPECTED)
    arrive(tree, there)
    copy = tmp_path / "there"
    assert (copy / "sub" / "b.sh").stat().st_mode & 0o777 == 0o700
    assert (copy / "link").readlink().name == "a.py"
    assert modes(read_tree(copy)) == EXPECTED
    assert agent_tree.Tree(str(copy)).lacks(tree.digest, None) is None

    (copy / "output").write_text("of a command")
    (folder / "sub" / "b.sh").unlink()
    (folder / "sub").rmdir()
    (folder / "sub").write_text("a file now")
    (folder / "a.py").unlink()
    (folder / "a.py").mkdir()
    (folder / "a.py" / "c").write_text("in a folder now")
    changed = read_tree(folder)
    again = agent_tree.Tree(str(copy))
    assert again.lacks(changed.digest, None) is True
    lacking = again.lacks(changed.digest, changed.entries)
    assert sorted(lacking) == ["a.py/c", "sub"]
    arrive(changed, again, lacking)
    assert (copy / "output").exists()
    (copy / "output").unlink()
    assert read_tree(copy).digest == changed.digest


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a//b", "./a", "a/."])
def test_a_path_that_leaves_the_tree_is_refused(tmp_path, path):
    there = agent_tree.Tree(str(tmp_path / "there"))
    with pytest.raises(OSError, match="not a path inside"):
        there.unpack(agent_tree.pack([[path, "file", "0", 1]], [b"x"]))
    assert [p.name for p in tmp_path.iterdir()] in ([], ["there"])


def test_a_link_that_leads_out_of_the_tree_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    there = agent_tree.Tree(str(tmp_path / "there"))
    there.unpack(agent_tree.pack([["a", "link", "0", len(str(outside))]], [str(outside).encode()]))
    there.unpack(agent_tree.pack([["a/b", "file", "0", 1]], [b"x"]))
    assert not list(outside.iterdir())
    assert (tmp_path / "there" / "a" / "b").read_text() == "x"


def test_removing_does_not_follow_a_link_that_replaced_a_folder(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b").write_text("mine")
    there = agent_tree.Tree(str(tmp_path / "there"))
    there.unpack(agent_tree.pack([["a/b", "file", "0", 1], ["c/d/e", "file", "0", 1]], [b"x", b"x"]))
    (tmp_path / "there" / "a" / "b").unlink()
    (tmp_path / "there" / "a").rmdir()
    (tmp_path / "there" / "a").symlink_to(outside)
    there.finish("none", [])
    assert (outside / "b").read_text() == "mine"
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["a"]
