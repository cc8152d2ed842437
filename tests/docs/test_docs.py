"""The documentation is true: its commands run, its output appears, its tables are complete, its links resolve.

Every ``console`` block of README.md and docs/ is executed, page by page, in a copy of a directory where ``make demo``
has run. A block may stand below a comment that says how its commands differ when a test runs them:

    <!-- run: steps=4 local=2x1x4 exit=2 -->    key=value   is appended to the arguments of ``slicewise train``
                                                local=SxHxD replaces the shape of the emulated cluster
                                                exit=N      is the exit code that the block shows (default 0)

``make test`` runs one file of the suite there. In what a block shows, ``...`` stands for anything and a number for any
number; shown lines must appear in that order, but several of them may be one line of the output. What a model
generated is not compared.
"""

import functools
import html.parser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from slicewise import cli
from slicewise.catalog import model
from slicewise.catalog.model import ModelSpec, RopeScaling, names
from slicewise.config import SECTION_OF, RunConfig, describe, load_config
from slicewise.data import sources
from slicewise.errors import ExitCode
from slicewise.interop.families import FAMILIES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(
    r"(?:<!-- run: (?P<run>[^\n]*?) -->\n+)?^```(?P<info>[^\n`]+)\n(?P<body>.*?)^```$", re.M | re.S
)
BLOCK_TIMEOUT_S = 240
SETUP = {"git", "cd", "pip", "uv", "make"}  # what ``sh`` blocks, which install, may call

SHIM = """#!/bin/bash
words=()
for word in "$@"; do
  if [[ $before == --local && -n $DOCS_LOCAL ]]; then word=$DOCS_LOCAL; fi
  words+=("$word")
  before=$word
done
if [[ $1 == train ]]; then words+=($DOCS_OVERRIDES); fi
exec {python} -m slicewise "${words[@]}"
"""


# ---------------------------------------------------------------- reading pages


@dataclass(frozen=True)
class Command:
    text: str
    shown: tuple[str, ...]  # lines of output


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    body: str
    run: str

    @property
    def commands(self) -> list[Command]:
        """None unless the language is console."""
        commands: list[Command] = []
        for line in self.body.splitlines() if self.language == "console" else ():
            if line.startswith("$ "):
                commands.append(Command(line[2:], ()))
            else:
                assert commands, f"output before the first command: {line}"
                commands[-1] = Command(commands[-1].text, (*commands[-1].shown, line))
        return commands

    @property
    def environment(self) -> dict[str, str]:
        words = dict(word.split("=", 1) for word in self.run.split())
        local, _ = words.pop("local", ""), words.pop("exit", "")
        assert words.keys() <= SECTION_OF.keys(), f"no config keys: {words.keys() - SECTION_OF.keys()}"
        return {"DOCS_LOCAL": local, "DOCS_OVERRIDES": " ".join(f"{k}={v}" for k, v in words.items())}

    @property
    def exit_code(self) -> int:
        found = re.search(r"\bexit=(\d+)", self.run)
        return int(found[1]) if found else 0


@functools.cache
def blocks(page: Path) -> tuple[Block, ...]:
    found = []
    for match in BLOCK.finditer(page.read_text()):
        title = re.search(r'title="([^"]*)"', match["info"])
        found.append(
            Block(match["info"].split()[0], title[1] if title else "", match["body"], match["run"] or "")
        )
    return tuple(found)


WITH_COMMANDS = [page for page in PAGES if any(block.commands for block in blocks(page))]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


@functools.cache
def all_text() -> str:
    return "\n".join(page.read_text() for page in PAGES)


def rows(page: Path) -> list[list[str]]:
    """The cells of every table row of a page."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# ---------------------------------------------------------------- running commands


def run_block(block: Block, directory: Path, cache: Path) -> list[tuple[str, int]]:
    """(output, exit code) of each command of a block, run by one shell."""
    mark = "@@exit code "
    script = "".join(f"{command.text}\nprintf '\\n{mark}%s\\n' $?\n" for command in block.commands)
    with subprocess.Popen(
        ["bash", "-c", f"exec 2>&1\n{script}"],
        cwd=directory,
        env={k: v for k, v in os.environ.items() if not k.startswith("SLICEWISE_")}
        | block.environment
        | {
            "PATH": f"{directory}/.venv/bin:{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            output, _ = shell.communicate(timeout=BLOCK_TIMEOUT_S)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
    parts = re.split(rf"^{mark}(\d+)\n", output, flags=re.M)
    return [(out, int(code)) for out, code in zip(parts[0::2], parts[1::2], strict=False)]


def pattern(shown: str) -> re.Pattern[str]:
    number = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
    parts = re.split(rf"(\s*\.\.\.\s*|{number}|\s+)", shown.strip())
    loose = [
        ".*" if p.strip() == "..." else number if p[:1].isdigit() else r"\s+" if p.isspace() else re.escape(p)
        for p in parts
    ]
    return re.compile("".join(loose))


def first_missing(shown: tuple[str, ...], output: str) -> str | None:
    """The first shown line that the output lacks at or after the place of the one before it."""
    lines, place = [line.strip() for line in output.splitlines()], 0
    for line in shown:
        if line.strip() in ("", "..."):
            continue
        if "slicewise generate" in line:  # as make echoes it; the model's words follow
            return None if "slicewise generate" in output else line
        place = next((i for i in range(place, len(lines)) if pattern(line).fullmatch(lines[i])), len(lines))
        if place == len(lines):
            return line
    return None


def check(command: Command, output: str, code: int, expected: int) -> None:
    assert code == expected, f"$ {command.text}\nexit code {code}, expected {expected}:\n{output}"
    if command.text.startswith("slicewise generate"):
        assert output.strip(), f"$ {command.text}\nprinted nothing"
        return
    missing = first_missing(command.shown, output)
    assert missing is None, f"$ {command.text}\nis shown to print:\n{missing}\nbut printed:\n{output}"


def demo_block() -> Block:
    found = [b for b in blocks(ROOT / "README.md") if any(c.text == "make demo" for c in b.commands)]
    assert len(found) == 1
    return found[0]


@dataclass(frozen=True)
class Demo:
    """A directory as a clone has it after ``make demo`` and ``make test``, and what those printed."""

    directory: Path
    cache: Path
    printed: dict[str, tuple[str, int]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Demo:
    directory, cache = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("compiled")
    for name in ("Makefile", "pyproject.toml", "uv.lock", ".python-version", "tests/test_config.py"):
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    shutil.copytree(ROOT / "examples", directory / "examples")
    programs = directory / ".venv" / "bin"
    programs.mkdir(parents=True)
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    for name, script in {"slicewise": SHIM.replace("{python}", sys.executable), "python": python}.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    (directory / ".venv" / "ready").touch()  # newer than the lock: make has no environment to create
    block = demo_block()
    results = run_block(block, directory, cache)
    return Demo(directory, cache, dict(zip((c.text for c in block.commands), results, strict=True)))


def run_page(page: Path, demo: Demo, directory: Path) -> list[tuple[Block, list[tuple[str, int]]]]:
    """The console blocks of a page with what each of their commands printed."""
    shutil.copytree(demo.directory, directory)
    ran = []
    for block in blocks(page):
        if block.title:
            (directory / block.title).write_text(block.body)
        if block.commands and block.commands[0].text in demo.printed:
            ran.append((block, [demo.printed[command.text] for command in block.commands]))
        elif block.commands:
            ran.append((block, run_block(block, directory, demo.cache)))
    return ran


@pytest.fixture(scope="module")
def pages(demo, tmp_path_factory, request):
    """What run_page gives of every page that is asked for, two pages at a time."""
    name = test_the_commands_of_a_page_run_and_print_what_it_shows.__name__
    asked = [i.callspec.params["page"] for i in request.session.items if i.name.startswith(f"{name}[")]
    with ThreadPoolExecutor(2) as pool:
        longest_first = sorted(asked, key=lambda page: page.name != "tutorial.md")
        yield {
            p: pool.submit(run_page, p, demo, tmp_path_factory.mktemp("page") / "clone")
            for p in longest_first
        }


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run_and_print_what_it_shows(page, pages):
    for block, results in pages[page].result():
        assert len(results) == len(block.commands), f"the shell ended early:\n{results}"
        for command, (output, code) in zip(block.commands, results, strict=True):
            check(command, output, code, block.exit_code)


@pytest.mark.parametrize(
    ("shown", "output", "missing"),
    [
        (("loss 5.1", "..."), "start\nloss 4.25\nend", None),
        (("loss 5.1  12 s/step",), "loss 4.25  0.3 s/step", None),
        (("614 passed in 200.1s ...",), "3 passed in 1s", None),
        (("step 1", "step 300"), "step 4", None),
        (("a", "b"), "b\na", "b"),
        (("loss 5.1",), "loss nan", "loss 5.1"),
        (("saved",), "not saved", "saved"),
    ],
)
def test_shown_output_is_compared_line_by_line(shown, output, missing):
    assert first_missing(shown, output) == missing


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_blocks_are_of_known_kinds_and_what_installs_names_real_extras(page):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for block in blocks(page):
        assert block.language in {"console", "sh", "toml", "text", "json"}, block.language
        if block.language == "console":
            assert block.commands
        elif block.language == "toml":
            tomllib.loads(block.body)
        elif block.language == "sh":
            lines = [line for line in block.body.splitlines() if line]
            assert {line.split()[0] for line in lines} <= SETUP
            named = re.findall(r"\[([a-z,]+)\]|--extra (\w+)", block.body)
            assert {e for pair in named for group in pair for e in group.split(",") if e} <= extras.keys()


# ---------------------------------------------------------------- complete and true


def test_configuration_lists_every_key_with_its_section_and_default():
    page = DOCS / "configuration.md"
    text = page.read_text()
    for part in RunConfig.model_fields.values():
        for key, field in part.annotation.model_fields.items():
            line = next(line for line in text.splitlines() if line.startswith(f"| `{key}` |"))
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            assert all(f"`{choice}`" in line for choice in choices), key
    sections = re.split(r"^## \[(\w+)\]$", text, flags=re.M)
    row = re.compile(r"^\| `(\w+)` \| `([^`]*)` \| \S.* \|$", re.M)
    documented = {
        key: (section, default)
        for section, body in zip(sections[1::2], sections[2::2], strict=True)
        for key, default in row.findall(body)
    }
    expected = {row.key: row for row in describe(load_config(None))}
    assert documented.keys() == expected.keys()
    for key, (section, default) in documented.items():
        assert section == expected[key].section, key
        assert default == ("derived" if expected[key].origin == "derived" else expected[key].value), key


def test_models_lists_every_key_of_a_model_file_every_name_and_every_family():
    page = DOCS / "models.md"
    table = {
        cells[0].strip("`"): cells[1].strip("`")
        for cells in rows(page)
        if len(cells) == 3 and cells[0] != "key"
    }
    assert table.keys() == ModelSpec.model_fields.keys()
    for key, field in ModelSpec.model_fields.items():
        if field.is_required():
            assert table[key] == "required", key
        elif field.default is not None:
            assert table[key] == json.dumps(field.default), key
    text = page.read_text()
    for name in [*RopeScaling.model_fields, *names(), *FAMILIES]:
        assert f"`{name}`" in text, name


def test_keys_in_prose_exist():
    assigned = {
        key
        for page in PAGES
        for span in re.findall(r"`([^`\n]+)`", prose(page))
        for key in re.findall(r"^(\w+) ?= ?[\w.\"*-]+$", span)
    }
    assert assigned
    assert not {key for key in assigned if key.islower()} - SECTION_OF.keys() - {"key"}  # key=value


def parsers(parser, path=("slicewise",)):
    """(verb as typed, its parser) of every verb, and of verbs below a verb."""
    for action in parser._actions:
        for name, sub in (getattr(action, "choices", None) or {}).items() if action.nargs == "A..." else ():
            yield " ".join([*path, name]), sub
            yield from parsers(sub, (*path, name))


def test_every_verb_and_option_is_documented():
    text = all_text()
    verbs = dict(parsers(cli._parser()))
    assert {"slicewise train", "slicewise config"} <= verbs.keys()
    for verb, parser in verbs.items():
        assert verb in text, f"no page says '{verb}'"
        pages = [p.read_text() for p in PAGES if verb in p.read_text()]
        for option in {o for action in parser._actions for o in action.option_strings} - {"-h", "--help"}:
            assert any(re.search(rf"`{option}[` ]|^\$ .*{option}\b", p, re.M) for p in pages), (
                f"{verb} {option}"
            )


def test_options_that_pages_name_exist():
    known = {o for _, parser in parsers(cli._parser()) for a in parser._actions for o in a.option_strings}
    known |= {"--help", "--version"}
    commands = [c.text for p in PAGES for b in blocks(p) for c in b.commands]
    used = {o for c in commands if c.startswith("slicewise") for o in re.findall(r"(?<=\s)--[\w-]+", c)}
    in_prose = {o for p in PAGES for o in re.findall(r"`(?:slicewise \w+ )?(--[a-z-]+)[^`]*`", prose(p))}
    assert used
    assert not (used | in_prose) - known


def test_exit_codes_are_the_table_of_errors():
    documented = {
        int(cells[0].strip("`")): cells[1]
        for cells in rows(DOCS / "errors.md")
        if cells[0].strip("`").isdigit()
    }
    for code in ExitCode:
        assert documented[code] == f"`{code.name}`"
    assert {code for code, name in documented.items() if name != "-"} == set(ExitCode)


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    lists += [group for group in project["dependency-groups"].values()]
    declared = {re.match(r"[\w-]+", entry)[0].lower() for entries in lists for entry in entries} - {
        "slicewise"
    }
    documented = {cells[0].strip("`") for cells in rows(DOCS / "dependencies.md") if cells[0].startswith("`")}
    assert documented == declared


def test_layers_are_those_that_the_linter_enforces():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [n.removeprefix("slicewise.") for c in contracts if c["type"] == "layers" for n in c["layers"]]
    documented = [cells[0].strip("`") for cells in rows(DOCS / "architecture.md") if cells[0].startswith("`")]
    assert [name for name in documented if name in layers] == layers


def test_pages_give_the_steps_and_the_batch_of_the_demo():
    config = load_config(str(ROOT / "examples" / "demo.toml")).config
    steps, every = config.run.steps, config.checkpoint.checkpoint_every
    saved = {str(step) for step in range(1, steps + 1) if step % every == 0 or step == steps}
    text = all_text()
    assert set(re.findall(r"(?:runs/(?:demo|again)/|`)checkpoints/(\d+)", text)) == saved
    assert set(re.findall(r"^step (\d+): loss", text, re.M)) == {str(steps)}
    assert set(re.findall(r"`step \d+/(\d+)", text)) == {str(steps)}
    tokens = config.data.global_batch_size * config.data.sequence_length
    assert set(re.findall(r"runs/demo starts: demo-1m, ([\d,]+) tokens/step", text)) == {f"{tokens:,}"}


def test_passages_are_as_long_as_data_says():
    said = re.search(r"about (\d+) KiB.*?at least (\d+) bytes a token", (DOCS / "data.md").read_text(), re.S)
    assert (int(said[1]) << 10, int(said[2])) == (sources.PASSAGE_BYTES, sources.PASSAGE_PER_SEQUENCE)


def test_make_targets_that_pages_name_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    named = {t for p in [*PAGES, *OTHERS] for t in re.findall(r"(?:`|^\$ )make (\w+)", p.read_text(), re.M)}
    assert {"demo", "test"} <= named <= targets


def test_every_example_is_used_and_loads():
    for example in sorted((ROOT / "examples").glob("*.toml")):
        assert f"examples/{example.name}" in all_text()
        is_model = "layers" in tomllib.loads(example.read_text())
        (model.load if is_model else load_config)(str(example))


# ---------------------------------------------------------------- links and the site


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda p: str(p.relative_to(ROOT)))
def test_internal_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose(page)):
        path, _, anchor = "".join(target).partition("#")
        if "://" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{path} does not exist"
        assert ROOT in file.parents, f"{path} lies outside the repository"
        assert not anchor or anchor in anchors(file), f"{path} has no heading #{anchor}"


def test_pictures_are_well_formed_and_fetch_nothing():
    for picture in DOCS.rglob("*.svg"):
        text = picture.read_text()
        assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert "prefers-color-scheme: dark" in text


def test_the_picture_of_the_architecture_shows_verbs_that_exist():
    text = (DOCS / "assets/architecture.svg").read_text()
    shown = re.findall(r'<rect class="verb"[^>]*>\s*<text class="b"[^>]*>([^<]*)<', text)
    assert {"plan", "compile", "train"} <= set(shown)
    assert {f"slicewise {verb}" for verb in shown} <= dict(parsers(cli._parser())).keys()
    assert "not built" not in text


class _Fetched(html.parser.HTMLParser):
    """What a browser would load by itself for a page."""

    def __init__(self):
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.urls.append(attributes.get("src") or "")
        if tag == "link" and attributes.get("rel") != "canonical":
            self.urls.append(attributes.get("href") or "")


def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES) - 1
    for page in pages:
        parser = _Fetched()
        parser.feed(page.read_text())
        assert parser.urls
        assert not [url for url in parser.urls if "//" in url], page
