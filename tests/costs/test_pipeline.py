import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import model
from slicewise.costs import pipeline
from slicewise.costs.parallelism import pipeline_bubble
from slicewise.errors import UserError

PIPELINE = {"stages": 4, "shards": 2, "batch": 32, "steps": 1, "asked": 0, "repeats": 1}


def settled(name="llama3-8b", **changed):
    spec = model.load(name)
    return pipeline.settled(spec.name, spec.staged_groups, **PIPELINE | changed)


@given(sequences=st.integers(1, 200), stages=st.integers(2, 8), repeats=st.integers(1, 4))
def test_the_derived_microbatches_are_the_fewest_that_idle_little_enough(sequences, stages, repeats):
    found, legal = pipeline.microbatches(sequences, stages, repeats), pipeline.counts(sequences, stages)
    if not legal:
        assert found == 0
        return
    assert found in legal
    assert all(m % stages == 0 and sequences % m == 0 for m in legal)
    idle = {m: pipeline_bubble(stages, m, repeats) for m in legal}
    if idle[found] > pipeline.MOST_IDLE:
        assert found == legal[-1]
    else:
        assert all(idle[m] > pipeline.MOST_IDLE for m in legal if m < found)


def test_microbatches_are_those_asked_for_or_derived_from_stages_and_rounds():
    assert settled() == 16
    assert settled(batch=256) == 32
    assert settled(batch=256, repeats=2) == 16
    assert settled(asked=8) == 8
    assert settled(stages=1) == 1


def test_a_plan_makes_as_many_rounds_as_it_takes_to_idle_little():
    assert pipeline.rounds(2, 16, 32) == 1
    assert pipeline.rounds(2, 8, 32) == 2
    assert pipeline.rounds(8, 8, 32) == 4
    assert pipeline.rounds(16, 16, 32) == 2  # 4 rounds would leave less than a layer


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stages": 3}, "parallelism 3 does not divide the 32 equal layers of llama3-8b; choose one of 1, 2, 4, 8"),
        ({"repeats": 3}, "parallelism 4 x pipeline_repeats 3 = 12 does not divide the 32 equal layers"),
        ({"name": "deepseek-v3"}, "parallelism 4 does not divide the 58 equal layers of deepseek-v3; .* 1, 2, 29, 58"),
        ({"asked": 32}, "= 32 has less than one sequence in a microbatch: .* 4 stages .* 16 sequences .* 4, 8, 16"),
        ({"asked": 6}, "pipeline_microbatches = 6 does not fit: expected a multiple of the 4 stages"),
        ({"batch": 36}, "global_batch_size = 36 does not give each of 4 pipeline stages .* = 8; use 32 or 40"),
        ({"batch": 4}, "a multiple of stages x data shards x accumulation steps = 8; use 8"),
        ({"batch": 48, "steps": 4}, "accumulation steps = 32; use 32 or 64"),
        ({"stages": 1, "asked": 4}, "pipeline_microbatches = 4 needs a pipeline of several stages"),
        ({"stages": 1, "repeats": 2}, "pipeline_repeats = 2 needs a pipeline of several stages"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_pipeline_is_one_sentence_with_what_could(changed, message):
    with pytest.raises(UserError, match=message):
        settled(**changed)
