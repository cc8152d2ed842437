"""An emulated Queued Resources service on loopback, whose virtual machines are local processes."""

from slicewise.launch.workers import Worker


def workers_of(name: str) -> list[Worker]:
    """The workers of a queued resource of the emulator that is running, by slice and worker. Raises UserError."""
    from slicewise.launch.queued_resources import connect, emulator_target, workers_of_client

    return workers_of_client(connect(emulator_target()), name)
