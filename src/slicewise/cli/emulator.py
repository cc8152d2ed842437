"""slicewise emulator: starts, breaks, shows and stops the emulated Queued Resources service."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slicewise.cli import quantities
from slicewise.cli.verbs import Verbs
from slicewise.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from slicewise.launch.emulator.local import State
    from slicewise.launch.emulator.records import Settings

FAULTS = ("preempt", "fail", "maintain", "partition", "freeze", "heal")
REPAIR_STATES = ("ACTIVE", "PROVISIONING", "WAITING_FOR_RESOURCES")


def register(verbs: Verbs) -> None:
    top = verbs.add("emulator", _nothing, "a Queued Resources service on this machine, without a cloud")
    sub = Verbs(top.add_subparsers(required=True, metavar="WHAT"))

    one = sub.add("start", _start, "serve the API on loopback until Ctrl-C, with local processes as VMs")
    _takes_state(one)
    one.add_argument("--detach", action="store_true", help="run in the background: 'emulator stop' ends it")
    one.add_argument("--port", default="0", metavar="N", help="of REST (default: a free one)")
    one.add_argument("--grpc-port", default="0", metavar="N", help="of gRPC (default: a free one)")
    chips = "chips of a family: v5litepod=64; repeat it (default: no limit)"
    one.add_argument("--capacity", action="append", default=[], metavar="FAMILY=N", help=chips)
    quota = "chips of a family that one project can hold in a zone, in any state"
    one.add_argument("--quota", action="append", default=[], metavar="FAMILY=N", help=quota)
    one.add_argument("--reservation", action="append", default=[], metavar="NAME", help="one that exists")
    one.add_argument("--step", default="0.05", metavar="T", help="time of each transition (default 0.05 s)")
    shown = f"state shown while slices are replaced: {', '.join(REPAIR_STATES)} (default ACTIVE)"
    one.add_argument("--repair-state", default="ACTIVE", metavar="STATE", help=shown)
    suspend = "the preemption of one of several slices suspends the whole queued resource"
    one.add_argument("--suspend-multislice", action="store_true", help=suspend)
    netns = "a network namespace for each worker: own address, port 22, 169.254.169.254 (needs root)"
    one.add_argument("--netns", action="store_true", help=netns)

    one = sub.add("inject", _inject, "break a node")
    one.add_argument("fault", metavar="FAULT", help=", ".join(FAULTS))
    one.add_argument("node", metavar="NODE", help="a node's id, or its full name")
    one.add_argument("--after", default="0", metavar="T", help="notice before a loss: SIGTERM, then it goes")
    one.add_argument("--hold", default="0", metavar="T", help="how long its chips stay away")
    one.add_argument("--for", dest="for_", metavar="T", help="heal a partition or freeze after T")
    one.add_argument(
        "--suspend", action="store_true", help="suspend the queued resource instead of repairing"
    )
    _takes_state(one)

    one = sub.add("capacity", _capacity, "change how many chips there are")
    one.add_argument("capacity", nargs="+", metavar="FAMILY=N", help="v5litepod=64")
    _takes_state(one)

    one = sub.add("status", _status, "show the emulator, its queued resources, nodes and chips")
    one.add_argument("--json", action="store_true", help="print JSON instead of text")
    _takes_state(one)

    one = sub.add("stop", _stop, "end the emulator and all its VMs")
    _takes_state(one)


def _takes_state(parser: argparse.ArgumentParser) -> None:
    where = "its state directory (default: $SLICEWISE_EMULATOR, else one of yours)"
    parser.add_argument("--state", metavar="DIR", help=where)


def _directory(arguments: argparse.Namespace) -> Path:
    from slicewise.launch.emulator.local import default_directory

    return Path(arguments.state).absolute() if arguments.state else default_directory()


def _nothing(arguments: argparse.Namespace) -> None:
    raise AssertionError("argparse demands one of the verbs below")


def _start(arguments: argparse.Namespace) -> None:
    directory = _directory(arguments)
    settings = _settings(arguments)
    rest_port, grpc_port = _port(arguments.port, "--port"), _port(arguments.grpc_port, "--grpc-port")
    if arguments.detach:
        from slicewise.launch.emulator import local

        argv = [word for word in _start_arguments(arguments) if word != "--detach"]
        _announce(local.start(directory, argv), directory)
        return
    try:
        from slicewise.launch.emulator import server
    except ModuleNotFoundError as error:
        raise UserError(
            f"the emulator needs {error.name}, which is not installed: pip install 'slicewise[emulator]'."
        ) from error
    options = server.Options(settings, directory, rest_port, grpc_port, arguments.netns)
    server.run(options, lambda state: _announce(state, directory))


def _start_arguments(arguments: argparse.Namespace) -> list[str]:
    """What a start in the background is told again; the state directory is given separately."""
    words = ["--port", arguments.port, "--grpc-port", arguments.grpc_port, "--step", arguments.step]
    words += ["--repair-state", arguments.repair_state]
    words += ["--suspend-multislice"] * arguments.suspend_multislice + ["--netns"] * arguments.netns
    for option in ("capacity", "quota", "reservation"):
        for value in getattr(arguments, option):
            words += [f"--{option}", value]
    return words


def _settings(arguments: argparse.Namespace) -> "Settings":
    from slicewise.launch.emulator.records import Settings, State

    if arguments.repair_state not in REPAIR_STATES:
        near = did_you_mean(arguments.repair_state, REPAIR_STATES)
        raise UserError(
            f"--repair-state {arguments.repair_state}: expected {', '.join(REPAIR_STATES)}.{near}"
        )
    return Settings(
        capacity=_chips(arguments.capacity, "--capacity"),
        quota=_chips(arguments.quota, "--quota"),
        reservations=frozenset(arguments.reservation),
        step_s=quantities.seconds(arguments.step, "--step", zero=True),
        repair_state=State[arguments.repair_state],
        suspend_multislice=arguments.suspend_multislice,
    )


def _chips(words: Sequence[str], option: str) -> Mapping[str, int]:
    """Chips by family of accelerator types. Raises UserError for a family that no accelerator type has."""
    from slicewise.catalog import chips

    families = [chips.load(name).type_prefix for name in chips.names() if chips.load(name).kind == "tpu"]
    found = {}
    for word in words:
        family, equals, number = word.partition("=")
        if not equals or not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise UserError(f"{option} {word}: expected FAMILY=CHIPS such as v5litepod=64.")
        if family not in families:
            near = did_you_mean(family, families)
            raise UserError(f"{option} {word}: no family '{family}'.{near} Known: {', '.join(families)}.")
        found[family] = int(number)
    return found


def _port(text: str, option: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < 65536):
        raise UserError(f"{option} {text}: expected a port, 0 to 65535.")
    return int(text)


def _announce(state: "State", directory: Path) -> None:
    print(f"emulator: REST http://{state.rest}, gRPC {state.grpc}, state in {directory}")
    sys.stdout.flush()


def _inject(arguments: argparse.Namespace) -> None:
    from slicewise.launch.emulator import local

    if arguments.fault not in FAULTS:
        near = did_you_mean(arguments.fault, FAULTS)
        raise UserError(f"there is no fault '{arguments.fault}'.{near} Faults: {', '.join(FAULTS)}.")
    answer = local.control(
        local.running(_directory(arguments)),
        "inject",
        fault=arguments.fault,
        node=arguments.node,
        after_s=quantities.seconds(arguments.after, "--after", zero=True),
        hold_s=quantities.seconds(arguments.hold, "--hold", zero=True),
        for_s=quantities.seconds(arguments.for_, "--for") if arguments.for_ else None,
        suspend=arguments.suspend,
    )
    print(f"{arguments.fault}: {answer['node']}")


def _capacity(arguments: argparse.Namespace) -> None:
    from slicewise.launch.emulator import local

    state = local.running(_directory(arguments))
    for family, chips in _chips(arguments.capacity, "capacity").items():
        local.control(state, "capacity", family=family, chips=chips)
        print(f"{family}: {chips} chips")


def _status(arguments: argparse.Namespace) -> None:
    import json

    from slicewise.launch.emulator import local

    directory = _directory(arguments)
    state = local.running(directory)
    found = local.control(state, "status")
    if arguments.json:
        print(json.dumps({"rest": state.rest, "grpc": state.grpc, **found}, indent=2))
        return
    _announce(state, directory)
    for name, shown in found["queued_resources"].items():
        print(f"{name}: {shown}")
    for name, shown in found["nodes"].items():
        link = found["links"].get(name)
        print(f"  {name}: {shown}{f', {link}' if link else ''}")
    for family, chips in found["used"].items():
        limit = found["capacity"].get(family)
        print(f"{family}: {chips} chips in use{f' of {limit}' if limit is not None else ''}")


def _stop(arguments: argparse.Namespace) -> None:
    from slicewise.launch.emulator import local

    local.stop(_directory(arguments))
