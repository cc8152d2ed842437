"""The agent of one worker: joins the gang of its job, runs the trainer, reports, and starts again as told.

    python -m slicewise.launch.agent --job RUN/job --submission ID --on tpu-vm|jobset|slurm
    python -m slicewise.launch.agent --job RUN/job --submission ID --slice I --host J --address A

Needs no JAX. On TPU VMs agents restart the gang themselves (`gang`); JobSet and Slurm do that, and there an agent
runs one attempt (`once`).
"""

import argparse
import os
import sys
from collections.abc import Sequence

from slicewise.errors import ExitCode, UserError
from slicewise.launch.job_folder import JobFolder
from slicewise.launch.place import METADATA_ADDRESS, Place, of_pod, of_slurm_task, of_tpu_vm


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the job, or of the attempt where the platform restarts."""
    options = _options(arguments)
    try:
        return _run(options)
    except UserError as error:
        print(f"slicewise: {error}", file=sys.stderr)
        return error.code


def _run(options: argparse.Namespace) -> int:
    job = JobFolder(options.job)
    spec = job.spec()
    if spec.submission != options.submission:
        print(
            f"slicewise: {options.job} was submitted again since: this agent is not wanted.", file=sys.stderr
        )
        return ExitCode.DONE
    if options.conclude:
        from slicewise.launch.once import conclude

        print(conclude(job, spec, int(os.environ.get("SLICEWISE_RESTART") or 0)))
        return ExitCode.DONE
    if options.on == "jobset":
        place = of_pod(os.environ)
    elif options.on == "slurm":
        place = of_slurm_task(os.environ, spec)
    elif options.slice is not None:
        place = Place(options.slice, options.host, options.address)
    else:
        place = of_tpu_vm()
        os.environ.setdefault("GCE_METADATA_IP", METADATA_ADDRESS)  # where trainers hear of a preemption
    place.check(spec)
    if options.on in ("jobset", "slurm"):
        from slicewise.launch.once import run_once

        restart = os.environ.get("SLICEWISE_RESTART") or "0"
        coordinator = os.environ.get("SLICEWISE_COORDINATOR", "")
        if not restart.isdecimal() or not coordinator:
            raise UserError(
                f"SLICEWISE_RESTART={restart!r} SLICEWISE_COORDINATOR={coordinator!r}: the manifest or batch"
                " script of the job sets both."
            )
        return run_once(job, spec, place, int(restart), coordinator)
    from slicewise.launch.gang import run_in_gang

    return run_in_gang(job, spec, place)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slicewise.launch.agent", description="Runs one worker of a job."
    )
    parser.add_argument("--job", required=True, help="the job's folder, RUN/job")
    parser.add_argument("--submission", required=True)
    parser.add_argument("--on", choices=["tpu-vm", "jobset", "slurm"], default="tpu-vm")
    parser.add_argument("--slice", type=int, help="this worker's place, where no platform says it")
    parser.add_argument("--host", type=int, default=0)
    parser.add_argument("--address", default="127.0.0.1")
    what = "do not run: say what Slurm's batch script is to do after its gang has ended"
    parser.add_argument("--conclude", action="store_true", help=what)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
