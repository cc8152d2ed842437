import jax
import pytest

from slicewise.compile.programs import build_program
from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh


@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_what_generates_does_not_divide_sequences(program):
    overrides = ["model=demo-tiny", "sequence_length=64", "global_batch_size=2", "ici_context_parallelism=2"]
    config = load_config(None, overrides).config
    with pytest.raises(
        UserError, match=f"{program} cannot divide sequences, .* context parallelism 2; set it to 1"
    ):
        build_program(program, config, build_mesh(config, by_slice(jax.devices()[:2])))
