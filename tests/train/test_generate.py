import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.data.tokenizers import Bytes
from slicewise.errors import UserError
from slicewise.kernels.attention.api import Tokens
from slicewise.model import transformer
from slicewise.train.generate import (
    Sampling,
    _continue,
    _encode,
    build_generate_step,
    draw,
    generate,
)
from slicewise.train.restore import open_trained

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0)
PROMPTS = ["The quick", "", "over the lazy dog and so on"]
NEVER = -5  # an end token that no model draws


class Model:
    def __init__(self, trained):
        trained.use_devices(1)
        self.opened = open_trained(str(trained.folder / "run"), [])
        self.spec, self.params, self.mesh = self.opened.step.spec, self.opened.params, self.opened.mesh
        self.step = build_generate_step(self.spec, self.mesh, jnp.dtype("float32"))

    def new_tokens(self, rows, count, sampling=GREEDY, end_id=NEVER):
        with jax.set_mesh(self.mesh):
            return _continue(self.step, self.params, rows, count, sampling, frozenset({end_id}))

    def logits(self, tokens):
        """[T, V] of one full forward pass without a cache."""
        length = len(tokens)
        where = Tokens(jnp.arange(length)[None], jnp.ones((1, length), jnp.int32))
        with jax.set_mesh(self.mesh):
            logits, _ = transformer.forward(
                self.params, self.spec, np.array([tokens], np.int32), where, dtype=jnp.dtype("float32")
            )
        return np.asarray(logits)[0, :, : self.spec.vocab]


@pytest.fixture(scope="module")
def model(trained):
    return Model(trained)


def encode(text):
    return _encode(Bytes(), text)


# ---------------------------------------------------------------- greedy


def test_greedy_tokens_are_the_likeliest_of_a_full_forward_pass(model):
    prompt = encode("The quick")
    (new,) = model.new_tokens([prompt], 12)
    logits = model.logits([*prompt, *new])
    assert new == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len(set(new)) > 3, "a model that repeats itself would prove little"


def test_prompts_of_different_lengths_in_a_batch_continue_as_each_alone(model):
    rows = [encode(prompt) for prompt in PROMPTS]
    together = model.new_tokens(rows, 10)
    assert together == [model.new_tokens([row], 10)[0] for row in rows]


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6)])
def test_sampling_from_one_token_is_greedy(model, sampling):
    rows = [encode(prompt) for prompt in PROMPTS]
    assert model.new_tokens(rows, 8, sampling) == model.new_tokens(rows, 8)


# ---------------------------------------------------------------- sampling


def test_samples_repeat_with_the_seed_and_differ_with_another(model):
    rows = [encode("The"), encode("The")]
    samples = [model.new_tokens(rows, 20, Sampling(1.0, seed=seed)) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    assert samples[0][0] != samples[0][1], "rows of a batch are drawn independently"


def test_an_end_token_stops_its_row_alone_and_is_not_returned(model):
    rows = [encode("The quick"), encode("A")]
    first, second = model.new_tokens(rows, 12)
    end = next(token for token in first if token not in second)
    stopped = model.new_tokens(rows, 12, end_id=end)
    assert stopped == [first[: first.index(end)], second]


def test_when_every_row_has_ended_nothing_more_is_computed(model):
    prompt = encode("The quick")
    (new,) = model.new_tokens([prompt], 3)
    calls = []
    counting = type(model.step)(model.step.prefill, lambda *a: calls.append(1) or model.step.decode(*a))
    with jax.set_mesh(model.mesh):
        assert _continue(counting, model.params, [prompt], 50, GREEDY, frozenset({new[0]})) == [[]]
    assert calls == []


logits_strategy = st.lists(
    st.floats(-8, 8, width=32).map(lambda x: round(x, 1)),  # one decimal: ties are common
    min_size=6,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    logits=logits_strategy,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.one_of(st.none(), st.integers(1, 9)),
    top_p=st.one_of(st.none(), st.floats(0.01, 1.0)),
    seed=st.integers(0, 2**31),
)
def test_draws_stay_within_top_k_and_top_p(logits, temperature, top_k, top_p, seed):
    """Tokens as likely as the last one let in are let in too."""
    scaled = np.array(logits, np.float64) / temperature
    allowed = np.ones(6, bool)
    if top_k is not None:
        allowed &= scaled >= np.sort(scaled)[::-1][min(top_k, 6) - 1] - 1e-6
    if top_p is not None:
        p = np.where(allowed, np.exp(scaled - scaled.max()), 0.0)
        p /= p.sum()
        likelier = np.array([p[p > x * (1 + 1e-6)].sum() for x in p])
        allowed &= likelier < top_p + 1e-5
    sampling = Sampling(temperature, top_k, top_p)
    rows = jnp.tile(jnp.array(logits, jnp.float32), (64, 1))
    drawn = np.asarray(draw(rows, jax.random.key(seed), sampling))
    assert allowed[drawn].all()
    assert np.asarray(draw(rows, jax.random.key(seed), sampling)).tolist() == drawn.tolist()


def test_draws_follow_the_softmax_at_the_temperature():
    logits = jnp.array([2.0, 1.0, 0.0, -1.0])
    drawn = draw(jnp.tile(logits, (20_000, 1)), jax.random.key(0), Sampling(temperature=2.0))
    expected = np.asarray(jax.nn.softmax(logits / 2.0))
    found = np.bincount(np.asarray(drawn), minlength=4) / 20_000
    assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / 20_000)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.85, 3), (0.97, 4)):
        drawn = draw(jnp.tile(logits, (2000, 1)), jax.random.key(1), Sampling(1.0, top_p=top_p))
        assert sorted(set(np.asarray(drawn).tolist())) == list(range(kept)), top_p


# ---------------------------------------------------------------- the verb


@pytest.mark.parametrize("devices", [1, 8])
def test_text_is_the_prompt_and_its_continuation_in_order_whatever_the_devices(trained, model, devices):
    trained.use_devices(devices)
    prompts = PROMPTS[:3]
    texts = generate(str(trained.folder / "run"), prompts, 10, GREEDY)
    expected = model.new_tokens([encode(prompt) for prompt in prompts], 10, end_id=Bytes.end_id)
    assert texts == [p + Bytes().decode(new) for p, new in zip(prompts, expected, strict=True)]


def test_a_prompt_is_bytes_of_any_script(trained):
    trained.use_devices(1)
    (text,) = generate(str(trained.folder / "run"), ["\u00fc\u4e2d\U0001f600"], 2, GREEDY)
    assert text.startswith("\u00fc\u4e2d\U0001f600")


def test_up_to_the_context_is_generated_and_beyond_it_refused(trained):
    trained.use_devices(1)
    run, context = str(trained.folder / "run"), 256
    prompt = "x" * (context - 3)  # and the begin token
    assert generate(run, [prompt], 2, GREEDY)[0].startswith(prompt)
    with pytest.raises(UserError, match=r"254 tokens and 3 more exceed the model's context of 256; shorten"):
        generate(run, [prompt], 3, GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature = -0.1: expected 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, r"temperature = nan"),
        ({"temperature": float("inf")}, r"temperature = inf"),
        ({"top_k": 0}, r"top_k = 0: expected 1 or more"),
        ({"top_p": 0.0}, r"top_p = 0.0: expected more than 0"),
        ({"top_p": 1.1}, r"top_p = 1.1: expected more than 0 and at most 1"),
        ({"top_p": float("nan")}, r"top_p = nan"),
        ({"seed": -1}, r"seed = -1: expected 0 to 4294967295"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)


def test_no_tokens_to_add_is_refused(trained):
    with pytest.raises(UserError, match=r"max_tokens = 0: expected 1 or more"):
        generate(str(trained.folder / "run"), ["x"], 0, GREEDY)
