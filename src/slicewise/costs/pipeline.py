"""What a pipeline may be: stages and rounds that divide the layers, microbatches that divide the batch."""

from slicewise.catalog.model import ModelSpec
from slicewise.config import RunConfig
from slicewise.costs.parallelism import pipeline_bubble
from slicewise.errors import UserError

MOST_IDLE = 0.1  # share of a step that a pipeline should idle at most


def microbatches(sequences: int, stages: int, repeats: int = 1) -> int:
    """The fewest microbatches that idle no more than MOST_IDLE, else the most there are; 0 where there are none.

    ``sequences``: of one data shard and accumulation step. Of few microbatches each is large, and large products are
    more efficient.
    """
    legal = counts(sequences, stages)
    enough = (m for m in legal if pipeline_bubble(stages, m, repeats) <= MOST_IDLE)
    return next(enough, legal[-1] if legal else 0)


def counts(sequences: int, stages: int) -> tuple[int, ...]:
    """Every number of microbatches: a multiple of the stages that leaves whole sequences."""
    return tuple(m for m in range(stages, sequences + 1, stages) if sequences % m == 0)


def settled(config: RunConfig, spec: ModelSpec, stages: int, shards: int) -> int:
    """The microbatches of a pipeline of ``stages`` whose batch is divided over ``shards`` beside.

    Raises UserError where stages do not divide the layers, or the batch does not give microbatches of whole sequences.
    """
    keys = config.parallelism
    if stages == 1:
        for key in ("pipeline_microbatches", "pipeline_repeats"):
            if (value := getattr(keys, key)) > 1:
                raise UserError(
                    f"{key} = {value} needs a pipeline of several stages; set ici_pipeline_parallelism or"
                    " dcn_pipeline_parallelism above 1, or leave it out."
                )
        return 1
    check_layers(spec, stages, keys.pipeline_repeats)
    steps, batch = config.optimizer.gradient_accumulation_steps, config.data.global_batch_size
    sequences = batch // (shards * steps)
    legal = counts(sequences, stages)
    if batch % (shards * steps) or not legal or sequences % stages:
        unit = shards * steps * stages
        below = batch - batch % unit
        raise UserError(
            f"global_batch_size = {batch} does not give each of {stages} pipeline stages whole microbatches: expected a"
            f" multiple of stages x data shards x accumulation steps = {unit}; use"
            f" {f'{below} or ' if below else ''}{below + unit}."
        )
    asked = keys.pipeline_microbatches or microbatches(sequences, stages, keys.pipeline_repeats)
    if asked not in legal:
        small = " has less than one sequence in a microbatch" if asked > sequences else ""
        raise UserError(
            f"pipeline_microbatches = {asked}{small or ' does not fit'}: expected a multiple of the {stages} stages that"
            f" divides the {sequences} sequences of a data shard, one of {', '.join(map(str, legal))}."
        )
    return asked


def check_layers(spec: ModelSpec, stages: int, repeats: int = 1) -> None:
    """Raises UserError where ``stages`` x ``repeats`` shares of the layers would not be equal."""
    count = spec.staged_groups
    if count % (stages * repeats) == 0:
        return
    layers = spec.groups.layers
    what = f"{count} layers" if count == spec.layers else f"{count} equal groups of {layers} layers"
    what = f"{count} sparse layers" if layers == 1 and count < spec.layers else what
    product = f" x pipeline_repeats {repeats} =" if repeats > 1 else ""
    fitting = [str(d) for d in range(1, count + 1) if count % d == 0]
    raise UserError(
        f"pipeline parallelism{f' {stages}{product}' if product else ''} {stages * repeats} does not divide the {what}"
        f" of {spec.name}; choose one of {', '.join(fitting)}."
    )
