"""What a pipeline may be: stages and rounds that divide the layers, microbatches that divide the batch."""

from slicewise.costs.parallelism import pipeline_bubble
from slicewise.costs.remat import RematPolicy
from slicewise.errors import UserError

MOST_IDLE = 0.1  # share of a step that a pipeline should idle at most
REPEATS = (1, 2, 4)  # rounds that a plan considers


def check_remat(stages: int, remat: RematPolicy) -> None:
    """Raises UserError for activations that wait on the host within the stages of a pipeline."""
    if stages > 1 and remat.offloaded:
        raise UserError(
            f"pipeline = {stages} does not go with {', '.join(sorted(remat.offloaded))} on the host: the TPU compiler"
            " refuses such a program; keep them on the device or recompute them."
        )


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


def settled(
    model: str,
    groups: int,
    *,
    stages: int,
    shards: int,
    batch: int,
    steps: int,
    asked: int,
    repeats: int,
) -> int:
    """The microbatches of a pipeline: ``asked``, or where that is 0 those that microbatches chooses.

    ``model`` has ``groups`` equal groups of layers; ``batch`` sequences are divided over ``shards`` beside the stages,
    and over ``steps`` of accumulation. Raises UserError where stages and rounds do not divide the layers, or the batch
    does not give microbatches of whole sequences.
    """
    if stages == 1:
        for key, value in (("pipeline_microbatches", asked), ("pipeline_repeats", repeats)):
            if value > 1:
                raise UserError(
                    f"{key} = {value} needs a pipeline of several stages; set ici_pipeline_parallelism or"
                    " dcn_pipeline_parallelism above 1, or leave it out."
                )
        return 1
    check_layers(model, groups, stages, repeats)
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
    asked = asked or microbatches(sequences, stages, repeats)
    if asked not in legal:
        wrong = "has less than one sequence in a microbatch" if asked > sequences else "does not fit"
        at_a_time = " and accumulation step" if steps > 1 else ""
        raise UserError(
            f"pipeline_microbatches = {asked} {wrong}: expected a multiple of the {stages} stages that divides the"
            f" {sequences} sequences of a data shard{at_a_time}, one of {', '.join(map(str, legal))}."
        )
    return asked


def check_layers(model: str, groups: int, stages: int, repeats: int = 1) -> None:
    """Raises UserError where ``stages`` x ``repeats`` shares of the layers would not be equal."""
    if groups % (stages * repeats) == 0:
        return
    fitting = ", ".join(str(d) for d in range(1, groups + 1) if groups % d == 0)
    product = f"{stages} x pipeline_repeats {repeats} = " if repeats > 1 else ""
    raise UserError(
        f"pipeline parallelism {product}{stages * repeats} does not divide the {groups} equal layers of {model};"
        f" choose one of {fitting}."
    )


def rounds(stages: int, microbatches: int, groups: int) -> int:
    """The fewest rounds that idle no more than MOST_IDLE, of those that divide the layers; else the most."""
    legal = [r for r in REPEATS if groups % (stages * r) == 0]
    return next((r for r in legal if pipeline_bubble(stages, microbatches, r) <= MOST_IDLE), legal[-1])
