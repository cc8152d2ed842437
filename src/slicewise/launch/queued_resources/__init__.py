"""Queued resources of Cloud TPU: asked for, waited for, listed and deleted, on Google Cloud or the emulator."""

from slicewise.launch.queued_resources.calls import (
    Client,
    EmulatorGone,
    connect,
    create,
    delete,
    delete_node,
    get,
    list_all,
    nodes,
    reset,
)
from slicewise.launch.queued_resources.collect import dead
from slicewise.launch.queued_resources.request import OWNER_LABEL, Request, owner
from slicewise.launch.queued_resources.target import Target, cloud_target, emulator_target, find_target
from slicewise.launch.queued_resources.wait import Progress, advice, wait, wait_until_gone, wait_until_ready
from slicewise.launch.queued_resources.workers import workers_of, workers_of_client

__all__ = [
    "OWNER_LABEL",
    "Client",
    "EmulatorGone",
    "Progress",
    "Request",
    "Target",
    "advice",
    "cloud_target",
    "connect",
    "create",
    "dead",
    "delete",
    "delete_node",
    "emulator_target",
    "find_target",
    "get",
    "list_all",
    "nodes",
    "owner",
    "reset",
    "wait",
    "wait_until_gone",
    "wait_until_ready",
    "workers_of",
    "workers_of_client",
]
