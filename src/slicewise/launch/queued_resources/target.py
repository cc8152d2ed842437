"""Where queued resources live: a project and zone of Google Cloud, or the emulator on this machine."""

import getpass
import os
import re
from dataclasses import dataclass
from pathlib import Path

from slicewise.errors import UserError
from slicewise.launch.emulator import local

PROJECT_VARIABLE, ZONE_VARIABLE = "SLICEWISE_PROJECT", "SLICEWISE_ZONE"
SSH_PORT = 22
_PROJECT = re.compile(r"(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
_ZONE = re.compile(r"[a-z]+(?:-[a-z0-9]+)+")


@dataclass(frozen=True)
class Target:
    """``endpoint`` is host:port of an emulator's gRPC, None for Google Cloud. ``host_key`` is the only key that
    its workers show, None where each has its own. ``ssh_port`` None means the one that a node names."""

    project: str
    zone: str
    user: str
    endpoint: str | None = None
    identity_file: str | None = None
    host_key: str | None = None
    ssh_port: int | None = SSH_PORT

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"

    def __str__(self) -> str:
        return f"{'emulator' if self.endpoint else 'project'} {self.project}, zone {self.zone}"


def find_target(project: str | None, zone: str | None, state: str | None = None) -> Target:
    """Google Cloud if a project or a zone is named, here or by $SLICEWISE_PROJECT and $SLICEWISE_ZONE; else the
    emulator of the state directory. Raises UserError for half a target, and when no emulator is running."""
    if state:
        if project or zone:
            raise UserError(
                "--emulator names an emulator, --project and --zone name Google Cloud: choose one."
            )
        return emulator_target(Path(state).absolute())
    project, zone = project or os.environ.get(PROJECT_VARIABLE), zone or os.environ.get(ZONE_VARIABLE)
    if not project and not zone:
        return emulator_target()
    if not project or not zone:
        missing = f"--zone or ${ZONE_VARIABLE}" if project else f"--project or ${PROJECT_VARIABLE}"
        raise UserError(f"Google Cloud needs a project and a zone: {missing} is missing.")
    return cloud_target(project, zone)


def cloud_target(project: str, zone: str) -> Target:
    """Raises UserError for names that cannot be."""
    if not _PROJECT.fullmatch(project):
        raise UserError(f"project '{project}' is no project id: expected 6 to 30 of a-z, 0-9 and -.")
    if not _ZONE.fullmatch(zone):
        raise UserError(f"zone '{zone}' is no zone: expected a name such as us-east5-a.")
    identity = Path.home() / ".ssh" / "google_compute_engine"  # gcloud's own, where it has made one
    return Target(
        project, zone, getpass.getuser(), identity_file=str(identity) if identity.exists() else None
    )


def emulator_target(directory: Path | None = None) -> Target:
    """Raises UserError when no emulator is running there."""
    state = local.running(directory)
    return Target(
        local.PROJECT,
        local.ZONE,
        getpass.getuser(),
        endpoint=state.grpc,
        identity_file=state.identity_file,
        host_key=state.host_key,
        ssh_port=None,
    )
