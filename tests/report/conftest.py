"""A page as a headless Chromium sees it."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@dataclass(frozen=True)
class Seen:
    dom: str  # after scripts have run
    console: tuple[str, ...]  # every message, refusals of the content policy among them


@dataclass(frozen=True)
class Browser:
    path: str

    def _run(self, page: Path, *options: str, dark: bool = False) -> subprocess.CompletedProcess:
        command = [
            self.path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}",
            "--virtual-time-budget=4000", "--window-size=1280,2000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", *options, page.as_uri(),
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    def look(self, page: Path) -> Seen:
        done = self._run(page, "--dump-dom")
        return Seen(done.stdout, tuple(re.findall(r"CONSOLE[^\"]*(\".*)", done.stderr)))

    def screenshot(self, page: Path, *, dark: bool = False) -> Path:
        picture = page.with_suffix(".png")
        self._run(page, f"--screenshot={picture}", dark=dark)
        return picture


@pytest.fixture(scope="session")
def browser():
    """Skips the test where there is no browser."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    return Browser(path)
