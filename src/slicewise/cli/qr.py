"""slicewise qr: queued resources of Cloud TPU, on Google Cloud or the emulator."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slicewise.cli import quantities
from slicewise.cli.verbs import Verbs
from slicewise.errors import ExitCode, UserError, did_you_mean

if TYPE_CHECKING:
    from slicewise.launch.queued_resources import Client, Progress, Request

STATES = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE", "SUSPENDING", "SUSPENDED",
          "FAILED", "DELETING")  # fmt: skip


def register(verbs: Verbs) -> None:
    top = verbs.add(
        "qr", _nothing, "queued resources: slices of Cloud TPU, asked for, waited for and deleted"
    )
    sub = Verbs(top.add_subparsers(required=True, metavar="WHAT"))
    _register_create(sub)

    one = _verb(sub, "list", _list, "every queued resource of the project and zone")
    one.add_argument("--json", action="store_true", help="print the API's JSON")

    one = _verb(sub, "describe", _describe, "one queued resource and its nodes")
    one.add_argument("name", metavar="NAME")
    one.add_argument("--json", action="store_true", help="print the API's JSON")

    one = _verb(sub, "wait", _wait, "wait for a state, and show the one it is in")
    one.add_argument("name", metavar="NAME")
    one.add_argument("--for", dest="state", default="ACTIVE", metavar="STATE", help="default ACTIVE")
    one.add_argument("--timeout", metavar="T", help="give up after T: 30min, 2h (default: never)")

    one = _verb(sub, "ssh", _ssh, "a shell, or a command, on workers")
    one.add_argument("name", metavar="NAME")
    _takes_place(one)
    one.add_argument("--command", metavar="TEXT", help="for the remote shell (default: a login shell)")

    one = _verb(sub, "scp", _scp, "copy files to or from workers")
    one.add_argument("name", metavar="NAME")
    one.add_argument(
        "paths", nargs="+", metavar="PATH", help="sources, then the target; :PATH is on the worker"
    )
    one.add_argument("--recursive", action="store_true", help="copy folders too")
    _takes_place(one)

    one = _verb(sub, "reset", _reset, "restart every slice; startup scripts run again")
    one.add_argument("name", metavar="NAME")
    _takes_async(one)

    one = _verb(sub, "delete", _delete, "delete queued resources and their slices")
    one.add_argument("names", nargs="+", metavar="NAME")
    one.add_argument("--force", action="store_true", help="also one that has slices, or is getting them")
    _takes_async(one)

    one = _verb(sub, "gc", _gc, "delete FAILED and SUSPENDED ones, which still count against the quota")
    one.add_argument("--owner", metavar="NAME", help="whose (default: those that you made with slicewise)")
    one.add_argument("--all-owners", action="store_true", help="everybody's that were made with slicewise")
    one.add_argument("--dry-run", action="store_true", help="only show them")
    _takes_async(one)


def _register_create(sub: Verbs) -> None:
    one = _verb(sub, "create", _create, "ask for slices, and wait until they are there")
    one.add_argument("name", metavar="NAME")
    kind = "of every slice, such as v5litepod-16 or v5p:4x4x8"
    one.add_argument("--accelerator-type", required=True, action="append", metavar="TYPE", help=kind)
    one.add_argument("--node-count", default="1", metavar="N", help="slices, 1 to 256 (default 1)")
    one.add_argument("--node-prefix", metavar="PREFIX", help="of node names, PREFIX-0 ... (default: NAME)")
    tier = one.add_mutually_exclusive_group()
    for name, help in (
        ("on-demand", "no tier of its own (default)"),
        ("spot", "cheaper; taken back at any time"),
        ("best-effort", "taken back at any time, by reservations too"),
        ("reserved", "from a reservation"),
    ):
        tier.add_argument(f"--{name}", dest="tier", action="store_const", const=name, help=help)
    one.set_defaults(tier="on-demand")
    one.add_argument("--reservation", metavar="NAME", help="with --reserved: which (default: any)")
    one.add_argument("--runtime-version", metavar="NAME", help="software of the VMs (default: by TPU type)")
    one.add_argument("--network", metavar="NAME", help="VPC network (default: the project's)")
    one.add_argument("--subnetwork", metavar="NAME", help="of that network")
    one.add_argument("--tag", action="append", default=[], metavar="TAG", help="network tag; repeat it")
    one.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="of nodes; repeat it")
    one.add_argument("--service-account", metavar="EMAIL", help="that the VMs act as")
    one.add_argument("--startup-script", metavar="FILE", help="that every VM runs at each start")
    one.add_argument("--valid-until", metavar="T", help="give the request up after T in the queue: 6h")
    one.add_argument(
        "--autocheckpoint", action="store_true", help="SIGTERM and time to save before maintenance"
    )
    one.add_argument(
        "--timeout", metavar="T", help="stop waiting after T; the request stays (default: never)"
    )
    _takes_async(one)


def _verb(sub: Verbs, name: str, verb: Any, help: str) -> argparse.ArgumentParser:
    one = sub.add(name, verb, help)
    one.add_argument("--project", metavar="P", help="of Google Cloud (default: $SLICEWISE_PROJECT)")
    one.add_argument("--zone", metavar="Z", help="of Google Cloud (default: $SLICEWISE_ZONE)")
    one.add_argument("--emulator", metavar="DIR", help="state directory of an emulator (default: yours)")
    return one


def _takes_async(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--async", dest="async_", action="store_true", help="do not wait")


def _takes_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slice", default="0", metavar="I|all", help="which slice (default 0)")
    parser.add_argument("--worker", default="0", metavar="J|all", help="which worker of it (default 0)")


def _nothing(arguments: argparse.Namespace) -> None:
    raise AssertionError("argparse demands one of the verbs below")


def _client(arguments: argparse.Namespace) -> "Client":
    from slicewise.launch.queued_resources import connect, find_target

    return connect(find_target(arguments.project, arguments.zone, arguments.emulator))


def _timeout_s(arguments: argparse.Namespace) -> float | None:
    return quantities.seconds(arguments.timeout, "--timeout") if arguments.timeout else None


class _Waiting:
    """The state on a terminal's one live line, or a line for each change of state elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        self._status = Console(stderr=True, highlight=False).status("") if sys.stderr.isatty() else None
        self._shown = ""

    def __enter__(self) -> "_Waiting":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._status:
            self._status.stop()

    def __call__(self, progress: "Progress") -> None:
        if self._status:
            from rich.markup import escape

            self._status.update(escape(str(progress)))
        elif progress.state != self._shown:
            print(progress, file=sys.stderr)
        self._shown = progress.state


def _wait_for(client: "Client", name: str, timeout_s: float | None, until: str = "ACTIVE") -> None:
    from slicewise.launch import queued_resources as api

    try:
        with _Waiting() as report:
            if until == "ACTIVE":
                api.wait_until_ready(client, name, timeout_s=timeout_s, report=report)
            else:
                api.wait(client, name, until=until, timeout_s=timeout_s, report=report)
    except KeyboardInterrupt:
        _say_what_stays(
            f"{name} stays: 'slicewise qr wait {name}' goes on waiting, 'slicewise qr delete {name} --force'"
            " deletes it."
        )
        raise
    print(f"{name}: {until}")


def _say_what_stays(text: str) -> None:
    print(f"\n{text}", file=sys.stderr)


def _create(arguments: argparse.Namespace) -> None:
    from slicewise.launch import queued_resources as api

    timeout_s, request = _timeout_s(arguments), _request(arguments)
    client = _client(arguments)
    try:
        api.create(client, request)
    except KeyboardInterrupt:
        _say_what_stays(
            f"{request.name} may have been made: 'slicewise qr describe {request.name}' shows it."
        )
        raise
    print(
        f"{request.name}: asked for {request.node_count} x {request.slice.accelerator_type} ({client.target})"
    )
    if not arguments.async_:
        _wait_for(client, request.name, timeout_s)


def _request(arguments: argparse.Namespace) -> "Request":
    from slicewise.launch.queued_resources import Request
    from slicewise.launch.queued_resources.request import check_same_type

    kinds = [word.strip() for given in arguments.accelerator_type for word in given.split(",")]
    valid = arguments.valid_until
    return Request(
        name=arguments.name,
        accelerator_type=check_same_type(kinds),
        node_count=quantities.whole(arguments.node_count, "--node-count"),
        node_prefix=arguments.node_prefix,
        tier=arguments.tier,
        runtime_version=arguments.runtime_version,
        reservation=arguments.reservation,
        network=arguments.network,
        subnetwork=arguments.subnetwork,
        tags=tuple(arguments.tag),
        labels=dict(_pair(word) for word in arguments.label),
        service_account=arguments.service_account,
        startup_script=_script(arguments.startup_script) if arguments.startup_script else None,
        valid_until_s=quantities.seconds(valid, "--valid-until") if valid else None,
        autocheckpoint=arguments.autocheckpoint,
    )


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals:
        raise UserError(f"--label {word}: expected KEY=VALUE.")
    return key, value


def _script(path: str) -> str:
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise UserError(f"--startup-script {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--startup-script {path} is not text.") from error
    if not text.strip():
        raise UserError(f"--startup-script {path} is empty.")
    return text


def _list(arguments: argparse.Namespace) -> None:
    from slicewise.costs.units import duration
    from slicewise.launch import queued_resources as api
    from slicewise.launch.queued_resources.describe import as_json, summary
    from slicewise.report.console import console
    from slicewise.report.tables import table

    client = _client(arguments)
    found = api.list_all(client)
    if arguments.json:
        _print_json([as_json(qr) for qr in found])
        return
    if not found:
        print(f"no queued resources ({client.target})")
        return
    made = table("name", "state", "type", "tier", "owner", "reason", "slices", "age", words=6)
    for qr in found:
        row = summary(qr)
        words = (row.name, row.state, row.accelerator_type, row.tier, row.owner, row.reason)
        made.add_row(*words, str(row.slices), duration(row.age_s))
    console().print(made)


def _describe(arguments: argparse.Namespace) -> None:
    from slicewise.launch import queued_resources as api
    from slicewise.launch.queued_resources.describe import as_json, details

    client = _client(arguments)
    qr, nodes = api.get(client, arguments.name), api.nodes(client, arguments.name)
    if arguments.json:
        _print_json({"queuedResource": as_json(qr), "nodes": [as_json(node) for node in nodes]})
        return
    said = api.advice(qr)
    print("\n".join([*details(qr, nodes), *([said] if said else [])]))


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))


def _wait(arguments: argparse.Namespace) -> None:
    if arguments.state not in STATES:
        near = did_you_mean(arguments.state.upper(), STATES)
        raise UserError(f"there is no state '{arguments.state}'.{near} States: {', '.join(STATES)}.")
    timeout_s = _timeout_s(arguments)
    _wait_for(_client(arguments), arguments.name, timeout_s, arguments.state)


def _chosen(arguments: argparse.Namespace) -> list[Any]:
    from slicewise.launch.queued_resources import ssh, workers_of_client

    workers = workers_of_client(_client(arguments), arguments.name)
    return ssh.choose(workers, arguments.slice, arguments.worker)


def _ssh(arguments: argparse.Namespace) -> int:
    from slicewise.launch.queued_resources import ssh

    command = arguments.command
    workers = _chosen(arguments)
    if len(workers) == 1:
        sys.stdout.flush()
        ssh.exec_ssh(workers[0], command)
    if not command:
        raise UserError(f"a login shell is for one worker; {len(workers)} workers need --command.")
    return _on_all(workers, lambda worker: ssh.ssh_command(worker, command, batch=True))


def _scp(arguments: argparse.Namespace) -> int:
    from slicewise.launch.queued_resources import ssh

    *sources, target = arguments.paths
    if not sources:
        raise UserError("scp needs a source and a target: qr scp NAME FILE :PATH, or qr scp NAME :PATH FILE.")
    ssh.check_copy(sources, target, recursive=arguments.recursive)
    workers = _chosen(arguments)
    if len(workers) > 1 and not target.startswith(":"):
        raise UserError(f"{len(workers)} workers would overwrite each other's {target}: copy from one.")
    recursive = arguments.recursive
    return _on_all(workers, lambda w: ssh.scp_command(w, sources, target, recursive=recursive))


def _on_all(workers: list[Any], command: Any) -> int:
    """The exit code of the first failure in time."""
    from slicewise.launch.queued_resources import ssh

    several = len(workers) > 1

    def say(worker: Any, line: str) -> None:
        print(f"s{worker.slice_index}w{worker.worker_index} | {line}" if several else line, flush=True)

    failed = [end for end in ssh.run_on(workers, command, say) if end.code]
    for end in reversed(failed):  # the first failure is the last line
        what = (
            "lost its connection, or ended with 255"
            if end.code == ssh.CONNECTION_LOST
            else f"ended with {end.code}"
        )
        print(f"slicewise: {end.worker.name} {what}", file=sys.stderr)
    return failed[0].code if failed else ExitCode.DONE


def _reset(arguments: argparse.Namespace) -> None:
    from slicewise.launch import queued_resources as api

    client = _client(arguments)
    api.reset(client, arguments.name)
    print(f"{arguments.name}: restarting")
    if not arguments.async_:
        _wait_for(client, arguments.name, None)


def _delete(arguments: argparse.Namespace) -> None:
    client = _client(arguments)
    _delete_all(client, arguments.names, arguments.force, arguments.async_)


def _delete_all(client: "Client", names: list[str], force: bool, async_: bool) -> None:
    from slicewise.launch import queued_resources as api

    for name in names:
        api.delete(client, name, force=force)
        print(f"{name}: deleting")
    try:
        for name in () if async_ else names:
            with _Waiting() as report:
                api.wait_until_gone(client, name, report=report)
            print(f"{name}: gone")
    except KeyboardInterrupt:
        _say_what_stays("the deletion goes on: 'slicewise qr list' shows what is left.")
        raise


def _gc(arguments: argparse.Namespace) -> None:
    from slicewise.launch import queued_resources as api
    from slicewise.launch.queued_resources.describe import summary

    if arguments.owner and arguments.all_owners:
        raise UserError("--owner and --all-owners exclude each other.")
    client = _client(arguments)
    owner = None if arguments.all_owners else api.owner(arguments.owner)
    found = [summary(qr) for qr in api.dead(api.list_all(client), owner)]
    for row in found:
        why = f": {row.reason}" if row.reason else ""
        print(f"{row.name} {row.state}, {row.slices} x {row.accelerator_type}, owner {row.owner}{why}")
    if not found:
        print("nothing to delete")
    elif not arguments.dry_run:
        _delete_all(client, [row.name for row in found], False, arguments.async_)
