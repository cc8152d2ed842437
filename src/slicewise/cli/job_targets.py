"""What 'slicewise job submit' makes of its options, for each target: the job, what it shows, and how it starts."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slicewise.cli import quantities
from slicewise.errors import UserError

if TYPE_CHECKING:
    from slicewise.config import LoadedConfig
    from slicewise.launch.job import Record
    from slicewise.launch.job_folder import JobSpec

ELASTIC = ("local", "queued-resource")  # targets that may begin with fewer slices
COMMAND = ("-m", "slicewise", "train", "{config}")
# options that belong to one target only, and the targets that take them
ONLY = {
    "local": ("local",),
    "type": ("queued-resource", "jobset"),
    "project": ("queued-resource",),
    "zone": ("queued-resource",),
    "emulator": ("queued-resource",),
    "reservation": ("queued-resource",),
    "runtime_version": ("queued-resource",),
    "network": ("queued-resource",),
    "subnetwork": ("queued-resource",),
    "label": ("queued-resource",),
    "package": ("queued-resource",),
    "service_account": ("queued-resource", "jobset"),
    "image": ("jobset",),
    "context": ("jobset",),
    "queue": ("jobset",),
    "priority_class": ("jobset",),
    "secret": ("jobset",),
    "sbatch": ("slurm",),
}


@dataclass(frozen=True)
class Planned:
    spec: "JobSpec"
    root: str
    shown: str  # by --dry-run
    submit: "Callable[[], Record]"


def plan(arguments: argparse.Namespace, loaded: "LoadedConfig") -> Planned:
    """Nothing is written yet. Raises UserError for what the target does not take, or lacks."""
    for option, targets in ONLY.items():
        if getattr(arguments, option) and arguments.target not in targets:
            raise UserError(
                f"--{option.replace('_', '-')} goes with --target {' or '.join(targets)},"
                f" not with {arguments.target}."
            )
    make = {"local": _local, "queued-resource": _queued_resource, "jobset": _jobset, "slurm": _slurm}
    return make[arguments.target](arguments, loaded)


def _spec(
    arguments: argparse.Namespace,
    loaded: "LoadedConfig",
    *,
    shared: bool,
    slices: int,
    hosts_per_slice: int,
    devices_per_host: int,
    cpu_devices: int = 0,
) -> tuple["JobSpec", str]:
    """The job and its folder; a layout that does not fit the slices is refused. ``devices_per_host`` 0: unknown."""
    from slicewise.config import check_effects, resolve_degrees
    from slicewise.launch import job
    from slicewise.launch.job_folder import JobSpec
    from slicewise.launch.policy import Budgets, Watch
    from slicewise.train.elastic import sizes

    per_slice = hosts_per_slice * devices_per_host
    if devices_per_host:
        degrees = resolve_degrees(loaded.config, num_slices=slices, devices_per_slice=per_slice)
        check_effects(loaded.config, None, degrees, slices)
    elastic = loaded.config.parallelism.elastic
    if elastic != "off" and arguments.target not in ELASTIC:
        raise UserError(
            f"elastic = {elastic} goes with --target {' or '.join(ELASTIC)}: on {arguments.target} the platform"
            " starts all slices or none; set it to off."
        )
    name = arguments.name or job.name_of_run(loaded.config.run.run_name)
    job.check_name(name)
    directory = job.run_directory(loaded.config.directory, arguments.target, shared=shared)
    spec = JobSpec(
        name=name,
        submission=job.new_submission(),
        target=arguments.target,
        command=COMMAND,
        config=job.config_text(loaded, directory),
        slices=slices,
        hosts_per_slice=hosts_per_slice,
        cpu_devices=cpu_devices,
        elastic_sizes=sizes(loaded.config, all_slices=slices, devices_per_slice=per_slice),
        budgets=Budgets(
            failures=_count(arguments.max_failures, "--max-failures"),
            preemptions=_count(arguments.max_preemptions, "--max-preemptions"),
        ),
        watch=Watch(
            start_timeout_s=quantities.seconds(arguments.start_timeout, "--start-timeout"),
            stall_timeout_s=quantities.seconds(arguments.stall_timeout, "--stall-timeout"),
            stop_grace_s=quantities.seconds(arguments.stop_grace, "--stop-grace"),
            replacement_wait_s=quantities.seconds(
                arguments.replacement_wait, "--replacement-wait", zero=True
            ),
        ),
        environment=job.environment_of(arguments.env),
        working_directory=str(Path.cwd()) if shared and not arguments.code else "",
    )
    return spec, job.folder_of(directory)


def _count(text: str, what: str) -> int:
    """A whole number, 0 included."""
    return quantities.whole(text, what, zero=True)


def _write(arguments: argparse.Namespace, spec: "JobSpec", root: str) -> "JobSpec":
    """The job's folder, with the code where there is some."""
    from slicewise.launch.job_folder import JobFolder
    from slicewise.launch.worker_files import pack_code

    folder = JobFolder(root)
    if arguments.code:
        spec = spec.model_copy(update={"code": pack_code(folder, Path(arguments.code))})
    folder.submit(spec)
    return spec


def _local(arguments: argparse.Namespace, loaded: "LoadedConfig") -> Planned:
    from slicewise.launch import job
    from slicewise.launch.targets.local import parse_shape

    if not arguments.local:
        raise UserError("--local SxHxD is missing: the cluster to emulate, such as 2x1x2.")
    shape = parse_shape(arguments.local)
    spec, root = _spec(
        arguments,
        loaded,
        shared=True,
        slices=shape.slices,
        hosts_per_slice=shape.hosts_per_slice,
        devices_per_host=shape.devices_per_host,
        cpu_devices=shape.devices_per_host,
    )

    def submit() -> "Record":
        return job.start_supervisor(
            job.new_record(spec.name, "local", root, _write(arguments, spec, root), {})
        )

    return Planned(spec, root, spec.config, submit)


def _slice(arguments: argparse.Namespace):
    from slicewise.catalog import slices

    if not arguments.type:
        raise UserError("--type is missing: the type of a slice, such as v6e-16 or v5p:4x4x8.")
    found = slices.parse(arguments.type)
    if found.chip.kind != "tpu":
        raise UserError(f"--type {arguments.type}: expected slices of TPUs.")
    return found


def _queued_resource(arguments: argparse.Namespace, loaded: "LoadedConfig") -> Planned:
    import sys

    from slicewise.launch import job
    from slicewise.launch import queued_resources as qr
    from slicewise.launch.job_folder import JobFolder
    from slicewise.launch.queued_resources.request import MAX_SLICES
    from slicewise.launch.targets import queued_resource as target

    one, count = _slice(arguments), quantities.whole(arguments.slices, "--slices")
    if count > MAX_SLICES:
        raise UserError(f"--slices {count}: a queued resource holds 1 to {MAX_SLICES} slices.")
    where = qr.find_target(arguments.project, arguments.zone, arguments.emulator)
    emulated = where.endpoint is not None
    spec, root = _spec(
        arguments,
        loaded,
        shared=emulated,
        slices=count,
        hosts_per_slice=one.hosts,
        devices_per_host=one.devices_per_host,
    )
    python = arguments.python or (sys.executable if emulated else "")
    request = qr.Request(
        name=spec.name,
        accelerator_type=arguments.type,
        node_count=count,
        tier=arguments.tier,
        reservation=arguments.reservation,
        runtime_version=arguments.runtime_version,
        network=arguments.network,
        subnetwork=arguments.subnetwork,
        labels={**_pairs(arguments.label, "--label"), qr.OWNER_LABEL: qr.owner()},
        service_account=arguments.service_account,
        startup_script=target.startup_script(root, spec.submission, python=python, package=arguments.package),
        autocheckpoint=True,
    )
    emulator = _emulator_directory(arguments) if emulated else ""
    slices = target.Slices(
        request, "" if emulated else where.project, "" if emulated else where.zone, emulator
    )

    def submit() -> "Record":
        target.refuse_existing(slices)
        written = _write(arguments, spec, root)
        target.write_slices(JobFolder(root), slices)
        return job.start_supervisor(job.new_record(spec.name, "queued-resource", root, written, {}))

    return Planned(spec, root, request.startup_script or "", submit)


def _emulator_directory(arguments: argparse.Namespace) -> str:
    from slicewise.launch.emulator.local import default_directory

    return str(Path(arguments.emulator).absolute() if arguments.emulator else default_directory())


def _pairs(words: list[str], what: str) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise UserError(f"{what} {word!r}: expected KEY=VALUE.")
    return dict(word.split("=", 1) for word in words)


def _jobset(arguments: argparse.Namespace, loaded: "LoadedConfig") -> Planned:
    from slicewise.launch import job
    from slicewise.launch.targets import jobset

    one = _slice(arguments)
    if not arguments.image:
        raise UserError("--image is missing: the container image of the workers, which has slicewise.")
    spec, root = _spec(
        arguments,
        loaded,
        shared=False,
        slices=quantities.whole(arguments.slices, "--slices"),
        hosts_per_slice=one.hosts,
        devices_per_host=one.devices_per_host,
    )
    placement = jobset.Placement(
        slice=one,
        image=arguments.image,
        namespace=arguments.namespace,
        context=arguments.context,
        queue=arguments.queue,
        priority_class=arguments.priority_class,
        service_account=arguments.service_account or "",
        secrets=tuple(arguments.secret),
        python=arguments.python or "python",
    )
    jobset.check(placement)
    made = jobset.manifest(spec, root, placement)

    def submit() -> "Record":
        written = _write(arguments, spec, root)
        jobset.apply(made, placement)
        record = job.new_record(spec.name, "jobset", root, written, placement.platform)
        job.save(record)
        return record

    return Planned(spec, root, jobset.as_yaml(made), submit)


def _slurm(arguments: argparse.Namespace, loaded: "LoadedConfig") -> Planned:
    import sys

    from slicewise.launch import job
    from slicewise.launch.targets import slurm

    devices = _count(arguments.cpu_devices, "--cpu-devices")
    spec, root = _spec(
        arguments,
        loaded,
        shared=True,
        slices=quantities.whole(arguments.slices, "--slices"),
        hosts_per_slice=quantities.whole(arguments.hosts_per_slice, "--hosts-per-slice"),
        devices_per_host=devices,
        cpu_devices=devices,
    )
    allocation = slurm.Allocation(tuple(arguments.sbatch), arguments.python or sys.executable)
    log = str(Path(root) / "slurm-%j.out") if "://" not in root else str(Path.cwd() / "slurm-%j.out")
    text = slurm.script(spec, root, allocation, log)

    def submit() -> "Record":
        written = _write(arguments, spec, root)
        record = job.new_record(spec.name, "slurm", root, written, {"id": slurm.submit(text)})
        job.save(record)
        return record

    return Planned(spec, root, text, submit)
