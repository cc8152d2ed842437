"""The verbs that compute: train, generate, evaluate; and config, which shows what they would do."""

import argparse
import gc
from pathlib import Path
from typing import TYPE_CHECKING

from slicewise.cli.verbs import Verbs

if TYPE_CHECKING:
    from slicewise.config import AxisDegrees, LoadedConfig, RunConfig
    from slicewise.launch.targets.local import ClusterShape

LEAVING_S = 5.0  # from a checkpoint that is complete to the end of the process that was asked to stop


def register(verbs: Verbs) -> None:
    sub = verbs.add("train", _train, "train a model on the devices of this job, or on an emulated cluster")
    takes_config(sub)
    local = "emulate a cluster here: slices x hosts per slice x devices per host, such as 2x2x2"
    sub.add_argument("--local", metavar="SxHxD", help=local)
    start = "with --local: most time without a sign of life before the first step (default 30min)"
    sub.add_argument("--start-timeout", default="30min", metavar="T", help=start)
    stall = "with --local: most time without progress after it (default 5min)"
    sub.add_argument("--stall-timeout", default="5min", metavar="T", help=stall)

    sub = verbs.add("config", _config, "print the resolved config, with where each value came from")
    takes_config(sub)
    sub.add_argument("--local", metavar="SxHxD", help="fill in the -1 of parallelism keys for such a cluster")

    sub = verbs.add("generate", _generate, "continue a prompt with a trained model")
    sub.add_argument("checkpoint", metavar="CKPT", help="a run's folder, or one step: RUN/checkpoints/STEP")
    sub.add_argument("--prompt", action="append", metavar="TEXT", help="repeat for a batch (default: empty)")
    sub.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens to add (default 128)")
    sub.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 = greedy (default 0.8)")
    sub.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    sub.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest that sum to P")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of the samples (default 0)")
    sub.add_argument(
        "--chat", action="store_true", help="prompts are what a user says; print the answers only"
    )
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="replace a key of the run's config")

    sub = verbs.add("export", _export, "write a trained model as a Hugging Face folder, adapters merged")
    sub.add_argument("checkpoint", metavar="CKPT", help="a run's folder, or one step: RUN/checkpoints/STEP")
    sub.add_argument("folder", metavar="FOLDER", help="where to write; must not exist or be empty")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="replace a key of the run's config")

    sub = verbs.add("evaluate", _evaluate, "loss and perplexity of a trained model on text")
    sub.add_argument("checkpoint", metavar="CKPT", help="a run's folder, or one step: RUN/checkpoints/STEP")
    sub.add_argument("--data", metavar="PATH", help="text to score (default: the run's held-out text)")
    sub.add_argument("--batches", type=int, metavar="N", help="score only the first N batches (default: all)")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="replace a key of the run's config")


def takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="RUN.toml", help="config file (default: all defaults)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replace a key of the config")


def load(arguments: argparse.Namespace) -> "LoadedConfig":
    from slicewise.config import load_config

    path, overrides = arguments.config, list(arguments.overrides)
    if path and "=" in path and not Path(path).exists():
        path, overrides = None, [path, *overrides]
    return load_config(path, overrides)


def _train(arguments: argparse.Namespace) -> int:
    gc.disable()  # little of what is loaded and traced up to the first step is garbage; the loop turns it on
    try:
        config = load(arguments).config
        if arguments.local is not None:
            return _train_locally(arguments, config)
        from slicewise.train.progress import dump_stacks_when_asked

        dump_stacks_when_asked()  # before the slow imports, which may be where it is stuck
        from slicewise.train.preemption import Preemption

        with Preemption() as preemption:
            from slicewise.train.loop import train

            return train(config, preemption)
    finally:
        gc.enable()


def _train_locally(arguments: argparse.Namespace, config: "RunConfig") -> int:
    from rich.console import Console

    from slicewise.cli import quantities
    from slicewise.config import check_effects
    from slicewise.launch.policy import Watch
    from slicewise.launch.targets.local import parse_shape, run_local

    watch = Watch(
        start_timeout_s=quantities.seconds(arguments.start_timeout, "--start-timeout"),
        stall_timeout_s=quantities.seconds(arguments.stall_timeout, "--stall-timeout"),
    )

    shape = parse_shape(arguments.local)
    # A mismatch is refused before anything starts.
    check_effects(config, None, _degrees(config, shape), shape.slices)
    command = ["-m", "slicewise", "train", *filter(None, [arguments.config]), *arguments.overrides]
    command += ["--debug"] if arguments.debug else []
    here = config.local_directory
    return run_local(
        command,
        shape,
        log_directory=here / "logs",
        console=Console(),
        run_directory=here,
        stop_grace_s=config.faults.stop_grace_s + LEAVING_S,
        watch=watch,
    )


def _degrees(config: "RunConfig", shape: "ClusterShape") -> "AxisDegrees":
    from slicewise.config import resolve_degrees

    per_slice = shape.hosts_per_slice * shape.devices_per_host
    return resolve_degrees(config, num_slices=shape.slices, devices_per_slice=per_slice)


def _config(arguments: argparse.Namespace) -> None:
    from slicewise.config import describe
    from slicewise.launch.targets.local import parse_shape

    loaded = load(arguments)
    degrees = _degrees(loaded.config, parse_shape(arguments.local)) if arguments.local is not None else None
    section = ""
    for row in describe(loaded, degrees):
        if row.section != section:
            print(f"{section and chr(10)}[{row.section}]")
            section = row.section
        print(f"{row.key} = {row.value}  # {row.origin}{'. ' + row.meaning if row.meaning else ''}")


def _generate(arguments: argparse.Namespace) -> None:
    from slicewise.train.generate import Sampling, generate

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    prompts = arguments.prompt or [""]
    for text in generate(
        arguments.checkpoint,
        prompts,
        arguments.max_tokens,
        sampling,
        arguments.overrides,
        is_chat=arguments.chat,
    ):
        print(text)


def _export(arguments: argparse.Namespace) -> None:
    from slicewise.train.export import export

    files, parameters = export(arguments.checkpoint, arguments.folder, arguments.overrides)
    print(f"{arguments.folder}: {parameters:,} parameters in {', '.join(files)}")


def _evaluate(arguments: argparse.Namespace) -> None:
    from slicewise.train.evaluate import evaluate

    score = evaluate(arguments.checkpoint, arguments.data, arguments.overrides, batches=arguments.batches)
    print(f"step {score.step}: loss {score.loss:.4f} nats/token, perplexity {score.perplexity:.3f}", end="")
    print(f", {score.tokens:,} tokens of {score.source}")
