"""slicewise job: training that goes on without a person, on slices that come and go."""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slicewise.cli import quantities
from slicewise.cli.verbs import Verbs
from slicewise.errors import ExitCode, UserError

if TYPE_CHECKING:
    from slicewise.config import LoadedConfig
    from slicewise.launch.job import Record, Status

TARGETS = ("queued-resource", "jobset", "slurm", "local")


def register(verbs: Verbs) -> None:
    top = verbs.add("job", _nothing, "training that goes on by itself: submit, list, status, logs, cancel")
    sub = Verbs(top.add_subparsers(required=True, metavar="WHAT"))
    one = sub.add("submit", _submit, "start a run as a job, which restarts and resumes with no hand on it")
    _takes_run(one)
    _takes_cluster(one)

    one = sub.add("list", _list, "the jobs that were submitted from this machine")
    one.add_argument("--json", action="store_true", help="print JSON instead of text")

    one = sub.add("status", _status, "how a job is doing, and why it was started again")
    one.add_argument("name", metavar="NAME")
    one.add_argument("--json", action="store_true", help="print JSON instead of text")

    one = sub.add("logs", _logs, "what a worker of a job printed")
    one.add_argument("name", metavar="NAME")
    one.add_argument("--worker", metavar="sIhJ", help="host J of slice I (default s0h0)")
    one.add_argument("--attempt", metavar="N", help="default: the newest")
    one.add_argument("--follow", action="store_true", help="go on until the job has ended")

    one = sub.add("cancel", _cancel, "let a job save, and end it")
    one.add_argument("name", metavar="NAME")

    one = sub.add("absent", _absent, "take slices of an emulated cluster away from a job, or give them back")
    one.add_argument("name", metavar="NAME")
    one.add_argument("slices", nargs="*", metavar="SLICE", help="those that are not there (default: all are)")

    one = sub.add(
        "supervise", _supervise, "look after a job again, whose supervisor has died with its machine"
    )
    one.add_argument("name", metavar="NAME")


def _takes_run(one: argparse.ArgumentParser) -> None:
    one.add_argument("config", metavar="RUN.toml", help="config file of the run")
    one.add_argument("overrides", nargs="*", metavar="key=value", help="replace a key of the config")
    one.add_argument("--target", required=True, choices=TARGETS, metavar="TARGET", help=", ".join(TARGETS))
    one.add_argument("--name", metavar="NAME", help="of the job (default: that of the run)")
    one.add_argument(
        "--code", metavar="DIR", help="ship this directory; the trainer imports it and starts in it"
    )
    one.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="for trainers; repeat it"
    )
    one.add_argument("--max-failures", default="3", metavar="N", help="restarts after failures (default 3)")
    spent = "restarts after preemptions (default 100)"
    one.add_argument("--max-preemptions", default="100", metavar="N", help=spent)
    start = "most time without a sign of life before the first step (default 30min)"
    one.add_argument("--start-timeout", default="30min", metavar="T", help=start)
    stall = "most time without progress after it (default 10min)"
    one.add_argument("--stall-timeout", default="10min", metavar="T", help=stall)
    one.add_argument(
        "--stop-grace", default="60s", metavar="T", help="time to save when stopped (default 60s)"
    )
    replacement = "of an elastic run: from the loss of a slice until it goes on without (default 5min)"
    one.add_argument("--replacement-wait", default="5min", metavar="T", help=replacement)
    one.add_argument("--python", metavar="PROGRAM", help="Python of the workers, which has slicewise")
    one.add_argument("--wait", action="store_true", help="stay until the job has ended, and show its log")
    one.add_argument("--dry-run", action="store_true", help="print what would be submitted, and stop")


def _takes_cluster(one: argparse.ArgumentParser) -> None:
    one.add_argument("--local", metavar="SxHxD", help="local: slices x hosts per slice x devices per host")
    one.add_argument("--type", metavar="TYPE", help="queued-resource, jobset: slice type, such as v6e-16")
    one.add_argument("--slices", default="1", metavar="N", help="number of slices (default 1)")
    qr = one.add_argument_group("queued-resource")
    qr.add_argument("--project", metavar="ID", help="of Google Cloud")
    qr.add_argument("--zone", metavar="ZONE", help="such as us-east5-a")
    qr.add_argument("--emulator", metavar="DIR", help="state directory of an emulator, instead of those two")
    tier = qr.add_mutually_exclusive_group()
    for name in ("spot", "best-effort", "reserved"):
        tier.add_argument(f"--{name}", dest="tier", action="store_const", const=name, help=f"{name} capacity")
    one.set_defaults(tier="on-demand")
    qr.add_argument("--reservation", metavar="NAME", help="with --reserved: which (default: any)")
    qr.add_argument("--runtime-version", metavar="NAME", help="software of the VMs (default: by TPU type)")
    qr.add_argument("--network", metavar="NAME", help="VPC network (default: the project's)")
    qr.add_argument("--subnetwork", metavar="NAME", help="of that network")
    qr.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="of nodes; repeat it")
    qr.add_argument("--service-account", metavar="NAME", help="that VMs act as; of jobset, that pods run as")
    qr.add_argument("--package", metavar="SPEC", help="what VMs install (default: this version of slicewise)")
    pods = one.add_argument_group("jobset")
    pods.add_argument("--image", metavar="IMAGE", help="container image that has slicewise")
    pods.add_argument("--namespace", default="default", metavar="NAME", help="default: default")
    pods.add_argument(
        "--context", default="", metavar="NAME", help="of the kubeconfig (default: the current)"
    )
    pods.add_argument("--queue", default="", metavar="NAME", help="Kueue's local queue")
    pods.add_argument("--priority-class", default="", metavar="NAME", help="of the pods")
    secret = "Kubernetes secret whose keys become environment; repeat it"
    pods.add_argument("--secret", action="append", default=[], metavar="NAME", help=secret)
    slurm = one.add_argument_group("slurm")
    hosts = "nodes of a slice (default 1)"
    slurm.add_argument("--hosts-per-slice", default="1", metavar="N", help=hosts)
    slurm.add_argument("--cpu-devices", default="0", metavar="N", help="devices a node, emulated on its CPU")
    option = "option of sbatch, such as partition=gpu; repeat it"
    slurm.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=option)


def _nothing(arguments: argparse.Namespace) -> None:
    raise AssertionError("argparse demands one of the verbs below")


def _submit(arguments: argparse.Namespace) -> int | None:
    from slicewise.cli import job_targets
    from slicewise.launch import job

    planned = job_targets.plan(arguments, _load(arguments))
    if arguments.dry_run:
        print(planned.shown, end="")
        return None
    job.refuse_running(planned.spec.name, planned.root)
    record = planned.submit()
    print(f"job {record.name}: submitted to {record.target}, in {record.root}", file=sys.stderr)
    if not arguments.wait:
        print(f"'slicewise job status {record.name}' shows how it is doing.", file=sys.stderr)
        return None
    return _follow(record)


def _load(arguments: argparse.Namespace) -> "LoadedConfig":
    from slicewise.config import load_config

    return load_config(arguments.config, arguments.overrides)


def _follow(record: "Record") -> int:
    """The log of worker 0 until the job has ended; its exit code. Ctrl-C leaves the job alone."""
    from slicewise.launch import job
    from slicewise.launch.output import without_chatter

    try:
        _write(without_chatter(job.log(record, None, None, follow=True)))
        last = job.wait(record)
    except KeyboardInterrupt:
        print(f"\njob {record.name} goes on; 'slicewise job cancel {record.name}' ends it.", file=sys.stderr)
        return 130
    print(f"job {record.name}: {last.state}" + (f": {last.why}" if last.why else ""), file=sys.stderr)
    return ExitCode.INTERNAL if last.code is None else last.code


def _write(chunks: Iterator[bytes]) -> None:
    for chunk in chunks:
        sys.stdout.write(chunk.decode("utf-8", "replace"))
        sys.stdout.flush()


def _list(arguments: argparse.Namespace) -> None:
    from slicewise.launch import job

    rows = [job.status_or_reason(record) for record in job.records()]
    if arguments.json:
        _print_json([_document(row) for row in rows])
        return
    if not rows:
        print("no job was submitted from this machine", file=sys.stderr)
        return
    from slicewise.report.console import console
    from slicewise.report.tables import Plain

    table = Plain("job", "target", "state", "attempt", "step", "submitted", box=None)
    for row in rows:
        table.add_row(row.record.name, row.record.target, row.state, str(row.attempt or ""), _step(row),
                      _ago(time.time() - row.record.submitted))  # fmt: skip
    console().print(table)


def _status(arguments: argparse.Namespace) -> None:
    from slicewise.launch import job

    now = job.status(job.find(arguments.name))
    if arguments.json:
        _print_json(_document(now))
        return
    rows = {
        "job": now.record.name,
        "state": now.state,
        "target": now.record.target,
        "slices": now.slices,
        "attempt": f"{now.attempt}, after {now.failures} failures and {now.preemptions} preemptions"
        if now.attempt
        else "",
        "step": _step(now) + (f", {_ago(now.step_age_s)}" if now.step_age_s is not None else ""),
        "loss": "" if now.loss is None else f"{now.loss:.4f} nats/token",
        "why": now.why,
        "exit code": "" if now.code is None else str(now.code),
        "folder": now.record.root,
    }
    for key, value in rows.items():
        if value:
            print(f"{key:<10} {value}")
    if now.state == "stalled":
        print(
            f"its supervisor does not run: 'slicewise job supervise {now.record.name}' looks after it again"
        )


def _step(now: "Status") -> str:
    return "" if now.step is None else f"{now.step}/{now.steps}"


def _ago(seconds: float) -> str:
    whole = max(0, int(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} ago"
    return f"{whole} s ago"


def _document(now: "Status") -> dict:
    return {**vars(now), "record": vars(now.record)}


def _print_json(document: object) -> None:
    import json

    print(json.dumps(document, indent=1))


def _logs(arguments: argparse.Namespace) -> None:
    from slicewise.launch import job

    attempt = quantities.whole(arguments.attempt, "--attempt") if arguments.attempt else None
    _write(job.log(job.find(arguments.name), arguments.worker, attempt, follow=arguments.follow))


def _cancel(arguments: argparse.Namespace) -> None:
    from slicewise.launch import job

    print(f"job {arguments.name}: {job.cancel(job.find(arguments.name))}", file=sys.stderr)


def _absent(arguments: argparse.Namespace) -> None:
    from slicewise.launch import elastic, job

    record = job.find(arguments.name)
    if record.target != "local":
        raise UserError(
            f"job '{record.name}' runs on {record.target}: only slices of an emulated cluster can be taken away."
        )
    slices = quantities.coordinates(",".join(arguments.slices), "SLICE") if arguments.slices else ()
    elastic.set_absent(record.folder, record.folder.spec(), slices)
    what = f"{elastic.several(slices)} not there from now on" if slices else "all slices are there"
    print(f"job {record.name}: {what}", file=sys.stderr)


def _supervise(arguments: argparse.Namespace) -> None:
    from slicewise.launch import job

    record = job.find(arguments.name)
    if record.target not in job.SUPERVISED:
        raise UserError(
            f"job '{record.name}' is looked after by {record.target}, not by a supervisor of its own."
        )
    if result := record.folder.result(record.submission):
        raise UserError(f"job '{record.name}' is {result.state} already.", code=ExitCode.CONFLICT)
    if job.is_supervised(record):
        raise UserError(
            f"job '{record.name}' has a supervisor, process {record.supervisor}.", code=ExitCode.CONFLICT
        )
    job.start_supervisor(record)
    print(
        f"job {record.name}: supervised again; output in {job.supervisor_log(record.name)}", file=sys.stderr
    )
