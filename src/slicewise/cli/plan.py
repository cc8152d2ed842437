"""plan: which slices and layout train a model, how long, how much, why; and what a config would change."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from slicewise.cli import hardware, quantities
from slicewise.cli.compile_more import given_values
from slicewise.cli.train import load
from slicewise.cli.verbs import Verbs
from slicewise.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from slicewise.config import LoadedConfig
    from slicewise.plan.offers import Goal
    from slicewise.plan.run_config import Change
    from slicewise.plan.search import Candidate
    from slicewise.plan.training import Choices, ScalingPoint, TrainingPlan

EPILOG = "Also: 'slicewise plan serve --help' and 'slicewise plan goodput --help'."


def register(verbs: Verbs) -> None:
    sub = verbs.add("plan", _plan, "rank the layouts of a training run, or price a config, and say why")
    sub.epilog = EPILOG
    sub.add_argument("config", nargs="?", metavar="RUN.toml", help="price this config instead of --model")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="replace a key of the config")
    work = sub.add_argument_group("what is trained")
    work.add_argument(
        "--model", metavar="MODEL", help="catalog name, ModelSpec .toml or Hugging Face config.json"
    )
    work.add_argument("--seq", metavar="TOKENS", help="tokens of a sequence: 8192 or 8k")
    work.add_argument("--batch-tokens", metavar="TOKENS", help="tokens of a global batch: 16M is 2^24")
    work.add_argument("--tokens", metavar="TOKENS", help="tokens of the whole run: 15T is 15e12")
    where = sub.add_argument_group("on what")
    hardware.takes_chip(where, several=True)
    hardware.takes_slice(where, required=False)
    where.add_argument("--max-chips", metavar="N", help="most chips of a free search (default 4096)")
    goal = sub.add_argument_group("goal of a free search, where --topology or --slices is left out")
    one = goal.add_mutually_exclusive_group()
    one.add_argument("--min-cost", action="store_true", help="the cheapest run")
    one.add_argument("--deadline", metavar="TIME", help="the cheapest run that ends within: 30d")
    one.add_argument("--budget", metavar="PRICE", help="the fastest run that costs at most: 2e6")
    how = sub.add_argument_group("how")
    how.add_argument("--remat", metavar="A,B", help="only these remat policies (default: all that are known)")
    how.add_argument(
        "--precision", metavar="A,B", help="bf16, int8, fp8 (default that of the config, or bf16)"
    )
    how.add_argument("--top", default="10", metavar="N", help="layouts shown (default 10)")
    how.add_argument("--scaling", action="store_true", help="also price other numbers of slices")
    how.add_argument("--write", metavar="RUN.toml", help="write the fastest layout into a config")
    hardware.takes_json(sub)
    hardware.takes_html(sub)


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.config and ("=" in arguments.config and arguments.model):
        raise UserError(
            f"{arguments.config}: a key=value is of a config, and --model of none; write model=NAME."
        )
    if arguments.config:
        _price(arguments)
        return
    from slicewise.report import training

    made = _search(arguments)
    curve = _scaling(arguments, made)
    written = _files(arguments, made, arguments.model, curve)
    hardware.show(
        arguments,
        lambda: training.document(made, scaling=curve),
        lambda out: _tables(out, made, curve, arguments),
        written,
    )


def _scaling(arguments: argparse.Namespace, made: "TrainingPlan") -> "Sequence[ScalingPoint]":
    from slicewise.plan import training

    return training.scaling(made) if arguments.scaling or arguments.html else ()


def _tables(
    out: "Console", made: "TrainingPlan", curve: "Sequence[ScalingPoint]", arguments: argparse.Namespace
) -> None:
    from slicewise.report import training_tables

    training_tables.plan(
        out, made, curve if arguments.scaling else (), shown=quantities.whole(arguments.top, "--top")
    )


def _search(arguments: argparse.Namespace) -> "TrainingPlan":
    from slicewise.costs.shapes import model_shape
    from slicewise.plan import training

    missing = [
        f"--{n}" for n in ("model", "seq", "batch-tokens") if not getattr(arguments, n.replace("-", "_"))
    ]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} missing: give RUN.toml, or --model, --seq and --batch-tokens."
        )
    work = training.workload(
        model_shape(hardware.model(arguments.model)),
        quantities.size(arguments.seq, "--seq"),
        quantities.size(arguments.batch_tokens, "--batch-tokens"),
    )
    tokens = quantities.amount(arguments.tokens, "--tokens") if arguments.tokens else None
    goal, choices = _goal(arguments, tokens), _choices(arguments)
    if goal is None:
        if arguments.max_chips:
            raise UserError(
                "--max-chips bounds a free search: give a goal (--min-cost, --deadline or --budget)."
            )
        if not arguments.topology:
            raise UserError(
                "--topology missing: give it with --slices, or a goal (--min-cost, --deadline or --budget)"
                " to have slices chosen."
            )
        return training.plan_cluster(work, hardware.cluster(arguments), run_tokens=tokens, choices=choices)
    most = quantities.whole(arguments.max_chips or str(training.MAX_CHIPS), "--max-chips")
    count = quantities.whole(arguments.slices, "--slices") if arguments.slices else None
    chips = hardware.chip_list(arguments, choices.precisions)
    candidates = training.clusters(
        chips, topology=arguments.topology, num_slices=count, max_chips=most, global_batch=work.global_batch
    )
    return training.plan_free(work, candidates, goal, choices=choices)


def _goal(arguments: argparse.Namespace, tokens: float | None) -> "Goal | None":
    from slicewise.plan.offers import Goal

    if not (arguments.min_cost or arguments.deadline or arguments.budget):
        return None
    if tokens is None:
        raise UserError("--tokens missing: a goal is about a whole run, such as --tokens 15T.")
    return Goal(
        tokens,
        quantities.seconds(arguments.deadline, "--deadline") if arguments.deadline else None,
        quantities.amount(arguments.budget, "--budget") if arguments.budget else None,
    )


def _choices(arguments: argparse.Namespace, precision: str = "bf16") -> "Choices":
    from slicewise.costs import remat
    from slicewise.plan.training import Choices

    precisions = (precision,) if arguments.precision is None else _listed(arguments.precision)
    top = max(20, quantities.whole(arguments.top, "--top"))
    if arguments.remat is None:
        return Choices(precisions=precisions, top=top)
    return Choices(tuple(map(remat.policy, _listed(arguments.remat))), precisions, top)


def _listed(text: str) -> tuple[str, ...]:
    """Each of several names with commas between, once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def _price(arguments: argparse.Namespace) -> None:
    """A config on a cluster, beside what the plan would do."""
    from slicewise.catalog import chips
    from slicewise.costs.shapes import model_shape
    from slicewise.plan import run_config, training
    from slicewise.report import training as report

    for option in ("model", "seq", "batch_tokens", "min_cost", "deadline", "budget", "max_chips"):
        if getattr(arguments, option):
            name = option.replace("_", "-")
            raise UserError(
                f"--{name} does not go with RUN.toml: change the config (key=value) or leave it out."
            )
    if not arguments.topology:
        raise UserError("--topology missing: a config is priced on one cluster, such as --topology 8x8x8.")
    loaded = load(arguments)
    config = loaded.config
    cluster, shape = hardware.cluster(arguments), model_shape(hardware.model(config.model.model))
    now = run_config.priced(config, shape, cluster)
    tokens = quantities.amount(arguments.tokens, "--tokens") if arguments.tokens else None
    work = run_config.workload_of(config, shape)
    run_tokens = tokens or config.run.steps * work.tokens
    choices = _choices(arguments, run_config.precision_on(cluster.chip, config))
    made = training.plan_beside(now, work, run_tokens=run_tokens, choices=choices)
    changes = run_config.changes(now, made.best)
    curve = _scaling(arguments, made)
    is_8_bit = config.quantization != "none"
    note = chips.saves_bytes_only(cluster.chip, config.quantization) if is_8_bit else None
    written = _files(arguments, made, config.model.model, curve, now, loaded)
    hardware.show(
        arguments,
        lambda: report.comparison(made, now, changes, scaling=curve),
        lambda out: _comparison(out, made, now, changes, curve if arguments.scaling else (), note),
        written,
    )


def _comparison(
    out: "Console",
    made: "TrainingPlan",
    now: "Candidate",
    changes: "Sequence[Change]",
    curve: "Sequence[ScalingPoint]",
    note: str | None,
) -> None:
    from slicewise.report import training_tables
    from slicewise.report.console import say

    training_tables.comparison(out, made, now, changes, curve)
    if note:
        say(out, note)


def _files(
    arguments: argparse.Namespace,
    made: "TrainingPlan",
    model: str,
    curve: "Sequence[ScalingPoint]",
    now: "Candidate | None" = None,
    loaded: "LoadedConfig | None" = None,
) -> list[str]:
    """Writes the page and the config that were asked for, and says which."""
    written = []
    if arguments.html is not None:
        from slicewise.report import pages

        written.append(hardware.save_html(arguments.html, pages.training(made, curve, now=now)))
    if arguments.write is not None:
        written.append(_write(arguments, made, model, loaded))
    return written


def _write(
    arguments: argparse.Namespace, made: "TrainingPlan", model: str, loaded: "LoadedConfig | None"
) -> str:
    """A new file holds the config that was given, with the layout; one that exists takes the layout alone."""
    from slicewise.plan import run_config, write

    quantization = loaded.config.quantization if loaded else "none"
    tokens = quantities.amount(arguments.tokens, "--tokens") if arguments.tokens else None
    values = run_config.config_values(
        made.result.workload, made.best, model=model, run_tokens=tokens, quantization=quantization
    )
    if loaded and not loaded.config.model.use_qwix_quantization:
        is_8_bit = values["quantization"] != "none"
        values |= {"use_qwix_quantization": True} if is_8_bit else {}
        values = values if is_8_bit else {k: v for k, v in values.items() if k != "quantization"}
    if loaded and not Path(arguments.write).exists():
        values = given_values(loaded) | values
    c = made.result.cluster
    note = f"Planned for {c.num_slices} x {c.chip.name} {c.slice.name}."
    return f"{arguments.write}: the first choice{write.write_config(arguments.write, values, note=note).note}"
