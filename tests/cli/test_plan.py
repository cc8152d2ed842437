"""Total time: about fifteen seconds."""

import contextlib
import io
import json
import re
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import cli
from slicewise.config import load_config, resolve_degrees
from slicewise.errors import UserError

TRAIN = "plan --model llama3-8b --chip v5p --topology 4x4x4 --seq 8k --batch-tokens 4M"
SERVE = "plan serve --model llama3.1-8b --chip v5e --prompt 8k --output 512 --latency-ms 30"
GOODPUT = (
    "plan goodput --chip v5p --topology 8x8x8 --slices 4 --host-mtbf 2y --checkpoint-time 30s"
    " --restart-time 5min"
)
COLLECTIVE = "roofline collective all-gather 34MB --chip v5e --topology 4x4"
SHARDED = ["roofline", "sharded-matmul", "B,D * D_X,F -> B,F", "512", "8k", "8k"]
SHARDED += ["--mesh", "X=4", "--chip", "v5e", "--topology", "4x4"]


def words(command):
    return command.split() if isinstance(command, str) else command


@pytest.fixture
def say(capsys):
    """Runs a command that must succeed and gives what it printed."""

    def run(command, *more):
        assert cli.main([*words(command), *more]) == 0
        return capsys.readouterr().out

    return run


@given(
    text=st.text("0123456789xX:-,_=*>.BDFvph \u00b2\u0664", max_size=16),
    option=st.sampled_from(["--topology", "--chip", "--slices", "--mesh", "LAYOUT", "--axes", "--precision"]),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_given_is_answered_or_refused_in_a_sentence(text, option):
    sharded = list(SHARDED)
    if option == "LAYOUT":
        sharded[2] = text or "-"
    elif option == "--mesh":
        sharded[7] = text
    commands = {"LAYOUT": sharded, "--mesh": sharded, "--axes": [*COLLECTIVE.split(), f"--axes={text}"]}
    command = commands.get(option, [*TRAIN.split(), "--top=1", f"{option}={text}"])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = cli.main(command)
        except SystemExit as stop:  # argparse
            code = stop.code
    assert code in (0, 2), said.getvalue()
    assert "internal error" not in said.getvalue()


def refused(command, *more):
    """The message of a command that the user has to change."""
    arguments = cli._parser().parse_args(cli._joined([*words(command), *more]))
    with pytest.raises(UserError) as error:
        arguments.verb(arguments)
    assert error.value.code == 2
    return str(error.value)


def test_rooflines_explain_the_inequality(say):
    text = say("roofline matmul 512 8k 8192 --chip v5e")
    assert "compute bound: intensity 455.1 > C/W = 240.2 FLOP/B" in text
    assert "int8 weights" in say("roofline matmul 512 8k 8k --chip v5e --weights int8")
    assert "bandwidth bound: 354 us" in say(COLLECTIVE)
    over = say("roofline collective all_reduce 1GB --chip v5p --topology 4x4x4 --slices 2 --across-slices")
    assert "n = 2 slices" in over
    assert "of 17.0 MB" in say(COLLECTIVE, "--sharded-ways", "2", "--axes", "0")
    copied = say("roofline copy 34MB --from 0,0 --to 3,3 --chip v5e --topology 4x4")
    assert "2 links" in copied
    assert "parameters 70.6 G" in say("roofline model llama3-70b --chip v5p --context 4k")


def test_sharded_matmuls_list_their_strategies(say):
    text = say(SHARDED)
    assert "all-reduce y over X" in text
    assert "all-gather w over X" in text
    assert "8x as fast" in text


def test_a_plan_ranks_layouts_and_says_why(say):
    text = say(TRAIN, "--tokens", "1T", "--top", "3")
    assert "llama3-8b on 1 x v5p 4x4x4 (64 chips), 4,194,304 tokens a step in 512 sequences of 8,192" in text
    rows = [line for line in text.splitlines() if line[:4].strip().isdigit()]
    assert len(rows) == 3
    assert rows[0].startswith("1   fsdp 64 ")
    assert "1.00 T tokens take" in text
    assert "at 4.2 a chip-hour" in text
    assert "holds: FSDP over 3 ICI axes needs 850 tokens a chip" in text
    assert "Not chosen" in text


def test_several_slices_show_the_rules_between_them(say):
    text = say(TRAIN, "--slices", "2")
    assert "data 2" in text
    assert "Between slices" in text
    assert "FLOP/bit x 32 bits a parameter" in text


def test_scaling_prices_other_numbers_of_slices(say):
    text = say(TRAIN, "--slices", "2", "--scaling", "--top", "1")
    rows = [line.split() for line in text.partition("Other numbers of slices")[2].splitlines()]
    assert [r[0] for r in rows if r and r[0].isdigit()] == ["1", "2", "4", "8"]
    found = json.loads(say(TRAIN, "--scaling", "--json"))
    assert [p["slices"] for p in found["scaling"]] == [1, 2, 4]
    assert {"chips", "ici", "estimate"} <= set(found["scaling"][0])


def test_remat_and_precision_restrict_the_search(say):
    found = json.loads(say(TRAIN, "--remat", "full,save_qkv_proj", "--precision", "bf16", "--json"))
    assert {row["remat_policy"] for row in found["ranked"]} <= {"full", "save_qkv_proj"}
    eight = json.loads(
        say(TRAIN.replace("v5p", "v5e").replace("4x4x4", "8x8"), "--precision", "int8", "--json")
    )
    assert {row["precision"] for row in eight["ranked"]} == {"int8"}


def test_a_free_search_chooses_the_slices(say):
    text = say(TRAIN.replace("--topology 4x4x4 ", ""), "--tokens", "1T", "--min-cost", "--max-chips", "64")
    assert "clusters reach the goal, the best first" in text
    found = json.loads(
        say("plan --model llama3-8b --chip v5p,v6e --seq 8k --batch-tokens 4M --tokens 1T --deadline 60d"
            " --max-chips 64 --json")
    )  # fmt: skip
    assert {o["cluster"]["chip"] for o in found["offers"]} == {"v5p", "v6e"}
    assert all(o["run_s"] <= 60 * 86400 for o in found["offers"])
    assert found["cluster"] == found["offers"][0]["cluster"]
    cheap = json.loads(say(TRAIN, "--tokens", "1T", "--budget", "2e6", "--json"))
    assert [o["cluster"]["topology"] for o in cheap["offers"]] == ["4x4x4"] * len(cheap["offers"])


def test_own_chips_and_prices_are_used(say, tmp_path):
    chips, prices = tmp_path / "chips.toml", tmp_path / "prices.toml"
    chips.write_text('[v9]\nbase = "v5p"\nbf16_flops_per_s = 1e15\n')
    prices.write_text("[v9]\non_demand = 2.5\n")
    own = ["--chip-file", str(chips), "--price-file", str(prices)]
    assert "on v9 in bf16" in say("roofline matmul 512 8k 8k --chip v9", *own[:2])
    text = say(TRAIN.replace("v5p", "v9"), "--tokens", "1T", *own)
    assert "at 2.5 a chip-hour" in text


def test_models_come_from_hugging_face_configs(say, tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "hidden_act": "silu", "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tmp_path.name in say(f"roofline model {tmp_path} --chip v5e")


def test_serving_shows_the_frontier(say):
    text = say(SERVE)
    assert "memory: weights" in text
    assert "separate prefill:" in text
    assert "Points that no other beats" in text
    one = json.loads(say(SERVE, "--topology", "2x4", "--quantization", "int8/int8", "--json"))
    assert {p["slice"]["topology"] for p in one["frontier"]} == {"2x4"}
    assert {p["quantization"]["weights"] for p in one["frontier"]} == {"int8"}
    four = json.loads(say(SERVE, "--chips", "4", "--json"))
    assert {p["slice"]["chips"] for p in four["frontier"]} == {4}


def test_goodput_compares_offers(say):
    text = say(GOODPUT, "--training-time", "42d", "--spot-price", "1.9", "--reserved-price", "2.9",
               "--preemptions-per-day", "3", "--wait", "30min", "--step-time", "11.6s")  # fmt: skip
    assert "Young sqrt(2 delta M) = 19.7 min" in text
    assert "checkpoint_every = 100 steps of 11.6 s" in text
    offers = [
        line.split()[0] for line in text.splitlines() if line.startswith(("spot", "reserved", "on demand"))
    ]
    assert offers == ["spot", "reserved", "on"]


def test_the_best_interval_is_written_into_a_config(say, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text("# mine\n[checkpoint]\ncheckpoint_keep = 5 # enough\n")
    say(GOODPUT, "--step-time", "11.6s", "--write", str(run))
    assert run.read_text() == "# mine\n[checkpoint]\ncheckpoint_keep = 5 # enough\ncheckpoint_every = 233\n"
    assert load_config(str(run)).config.checkpoint.checkpoint_every == 233


def test_a_plan_is_written_as_a_config_that_fits_the_cluster(say, tmp_path):
    run = tmp_path / "run.toml"
    say(TRAIN, "--tokens", "1T", "--write", str(run))
    config = load_config(str(run)).config
    assert config.model.model == "llama3-8b"
    assert (config.data.sequence_length, config.data.global_batch_size) == (8192, 512)
    assert config.run.steps == 238419
    degrees = resolve_degrees(config, num_slices=1, devices_per_slice=64)
    assert config.data.global_batch_size % (degrees.total("data") * degrees.total("fsdp")) == 0
    assert run.read_text().startswith("# Planned for 1 x v5p 4x4x4.")


def test_an_existing_config_keeps_what_the_plan_does_not_decide(say, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text('[run]\nrun_name = "mine" # keep\n[data]\nsequence_length = 1\n')
    say(TRAIN, "--write", str(run))
    assert 'run_name = "mine" # keep' in run.read_text()
    assert tomllib.loads(run.read_text())["data"]["sequence_length"] == 8192


def test_a_config_is_priced_beside_the_plan(say, tmp_path):
    run = tmp_path / "run.toml"
    say(TRAIN, "--write", str(run))
    where = "--chip v5p --topology 4x4x4"
    text = say(f"plan {run} {where}")
    assert "The config: " in text
    assert "The plan would change nothing" in text
    crowded = say(f"plan {run} remat_policy=none gradient_accumulation_steps=1 {where}")
    assert "It does not fit: " in crowded
    assert re.search(r"accumulation steps +gradient_accumulation_steps +1 +4", crowded)
    places = ",".join(
        f'{name}="device"' for name in ("query_proj", "key_proj", "value_proj", "out_proj", "mlpwo")
    )
    long = say(f"plan {run} remat_policy=custom remat_tensors={{{places}}} ici_fsdp_parallelism=64 {where}")
    assert re.search(r"remat policy +remat_policy +\{", long)
    found = json.loads(say(f"plan {run} remat_policy=full {where} --json"))
    assert found["kind"] == "config priced"
    assert found["config"]["fits"] is True
    assert found["config"]["ici"]["fsdp"] == 64
    assert {"what", "key", "now", "then"} == set(found["changes"][0])


def test_a_plan_of_a_config_keeps_what_is_not_searched_and_writes_it(say, tmp_path):
    """Static scales, the dispatch of experts, and a state that replicas share out; in a new file all that was given."""
    keys = "quantization=int8 quantization_calibrate_every=9 moe_dispatch=capacity optimizer_type=lion"
    keys += " shard_optimizer_over_data=true steps=7 sequence_length=4096 global_batch_size=256 model=mixtral-8x7b"
    run, where = tmp_path / "run.toml", "--chip v5p --topology 2x2x4 --remat full,minimal --scaling --json"
    say(f"plan {keys} {where} --write {run}")
    asked, written = load_config(None, keys.split()).config, load_config(str(run)).config
    assert written.run == asked.run
    assert written.model.quantization_calibrate_every == 9
    assert written.model.moe_dispatch == "capacity"
    assert written.optimizer.optimizer_type == "lion"
    found = json.loads(say(f"plan {run} {where}"))
    assert found["changes"] == []
    own = next(point for point in found["scaling"] if point["slices"] == 1)
    assert found["config"]["estimate"] == found["ranked"][0]["estimate"] == own["estimate"]


@pytest.mark.parametrize(("chip", "precision"), [("v5p", "--precision bf16"), ("v4", "")])
def test_a_plan_without_8_bits_is_written_over_a_config_that_has_scales(say, tmp_path, chip, precision):
    run = tmp_path / "run.toml"
    run.write_text(
        '[model]\nmodel = "llama3-8b"\nquantization = "fp8" # mine\nquantization_calibrate_every = 9\n'
        "[data]\nsequence_length = 4096\nglobal_batch_size = 64\n"
    )
    said = say(f"plan {run} --chip {chip} --topology 2x2x4 --remat full {precision} --write {run}")
    assert "faster than bfloat16" in said or chip != "v4"
    assert load_config(str(run)).config.quantization == "none"
    assert "# mine" in run.read_text()


@pytest.mark.parametrize(
    ("option", "kept"),
    [("", ("fp8", False)), ("--precision bf16", ("fp8", False)), ("--precision int8", ("int8", True))],
)
def test_a_switch_that_is_off_is_left_so_unless_the_plan_is_in_8_bits(say, tmp_path, option, kept):
    run = tmp_path / "run.toml"
    keys = "model=demo-1m quantization=fp8 use_qwix_quantization=false global_batch_size=8"
    say(f"plan {keys} --chip v5p --topology 2x2x1 --remat minimal {option} --write {run}")
    model = load_config(str(run)).config.model
    assert (model.quantization, model.use_qwix_quantization) == kept


def test_a_config_that_is_the_plan_needs_no_change(say, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text('[model]\nmodel = "demo-1m"\n[data]\nglobal_batch_size = 8\n')
    assert "The plan would change nothing." in say(f"plan {run} --chip v5e --topology 2x4 --remat minimal")
    text = say(f"plan {run} --chip v5e --topology 2x4 --scaling --precision int8")
    assert "Other numbers of slices" in text
    assert re.search(r"precision +quantization +none +int8", text)


@pytest.mark.parametrize("command", [TRAIN, SERVE, GOODPUT])
def test_html_is_written_beside_the_text(say, tmp_path, command):
    page = tmp_path / "page.html"
    assert say(command, "--html", str(page))
    assert page.read_text().startswith("<!doctype html>")


KEYS = {
    "roofline matmul 512 8k 8k --chip v5e": {
        "chip", "B", "D", "F", "precision", "weights", "flops", "bytes", "flops_per_s", "hbm_bytes_per_s",
        "critical_batch", "critical_batch_exact", "padding", "time", "intensity", "explanation",
    },
    COLLECTIVE: {"op", "where", "bytes", "group", "time_s", "explanation"},
    "roofline copy 34MB --from 0,0 --to 3,3 --chip v5e --topology 4x4": {"copy", "explanation"},
    "roofline model llama3-8b --chip h100": {
        "model", "chip", "context", "params", "flops_per_token", "attention_share", "kv_bytes_per_sequence",
        "state_bytes", "min_chips", "alpha", "min_tokens_per_chip", "max_tensor_ways",
        "min_tokens_per_chip_mixed", "min_tokens_per_slice", "decode_critical_batch", "explanation",
    },
    tuple(SHARDED): {
        "slice", "mesh", "B", "D", "F", "flops_per_s", "link_bytes_per_s", "strategies", "explanation",
    },
    SERVE: {
        "model", "chip", "workload", "best", "fastest", "frontier", "rejected", "disaggregated",
        "cache_transfer_s", "explanation",
    },
    GOODPUT: {"cluster", "faults", "chosen", "offers", "step_time_s", "checkpoint_every", "explanation"},
    TRAIN: {
        "model", "parameters", "sequence_length", "global_batch", "batch_tokens", "run_tokens", "cluster",
        "layouts_considered", "layouts_fitting", "memory_margin", "ranked", "reasons", "offers", "scaling",
    },
}  # fmt: skip


@pytest.mark.parametrize("command", KEYS, ids=lambda c: " ".join(words(c)[:2]))
def test_json_has_the_keys_that_scripts_rely_on(say, command):
    found = json.loads(say(list(words(command)), "--json"))
    assert set(found) == KEYS[command] | {"kind", "schema"}
    assert found["schema"] == 1


def test_json_of_a_layout_has_its_degrees_and_its_whole_estimate(say):
    first = json.loads(say(TRAIN, "--json"))["ranked"][0]
    assert set(first) == {
        "rank", "ici", "dcn", "global_batch", "batch_per_device", "accumulation_steps",
        "pipeline_microbatches", "pipeline_repeats", "pipeline_gather", "remat_policy", "saved", "offloaded",
        "precision", "context_strategy", "estimate", "run_s", "cost",
    }  # fmt: skip
    assert set(first["ici"]) == {"data", "fsdp", "tensor", "context", "expert", "pipeline"}
    assert set(first["estimate"]) >= {
        "step_time_s", "compute_s", "exposed_s", "communication_s", "other_s", "hbm_bytes", "hbm_total_bytes",
        "hbm_limit_bytes", "host_bytes", "tokens_per_s", "mfu",
    }  # fmt: skip


BAD = [
    (TRAIN.replace("v5p", "v5q"), "unknown chip 'v5q'. Did you mean 'v5p'?"),
    (TRAIN.replace("llama3-8b", "llama3-8"), "unknown model 'llama3-8'. Did you mean 'llama3-8b'?"),
    (TRAIN.replace("4x4x4", "4x4x5"), "v5p has no 4x4x5 slice; the nearest that can be had: 4x4x4"),
    (TRAIN.replace("4M", "4k"), "a batch of 4,096 tokens is below one sequence of 8,192; expected 8,192"),
    (TRAIN.replace("4M", "12k"), "is not a whole number of sequences of 8,192; the nearest is 16,384, 2 seq"),
    (
        TRAIN.replace("4M", "lots"),
        "--batch-tokens lots: expected a whole number above 0, such as 8192, 8k or 16M",
    ),
    (TRAIN.replace("8k", "0"), "--seq 0: expected"),
    (TRAIN.replace("--seq 8k ", ""), "--seq missing"),
    (TRAIN.replace("--topology 4x4x4 ", ""), "--topology missing"),
    (TRAIN + " --min-cost", "--tokens missing"),
    (TRAIN + " --slices 0", "--slices 0: expected a whole number above 0, such as 4 or 2k"),
    (TRAIN + " --tokens 1T --deadline 1h", "no cluster meets the goal; the fastest takes"),
    (TRAIN + " --remat most", "unknown remat_policy 'most'"),
    (TRAIN + " --precision int4", "precision 'int4': expected bf16, int8, fp8."),
    (
        "plan --model llama3.1-405b --chip v5e --topology 2x2 --seq 8k --batch-tokens 1M",
        "does not fit on 1 x 2x2",
    ),
    ("plan nowhere.toml --chip v5p --topology 4x4x4", "config file nowhere.toml: No such file"),
    ("plan run.toml --model llama3-8b --chip v5p --topology 4x4x4", "--model does not go with RUN.toml"),
    (
        SERVE.replace("--latency-ms 30", "--latency-ms 0.01"),
        "gives a token of llama3.1-8b every 10.0 us; the least",
    ),
    (SERVE.replace("8k", "1M"), "has a context of"),
    (SERVE + " --chips 3", "v5e has no slice of 3 chips; the nearest that can be had"),
    (SERVE + " --quantization int8/int8/bf16/x", "expected weights, cache and arithmetic"),
    (SERVE + " --quantization int7", "weights = 'int7'"),
    (SERVE.replace("8b", "405b") + " --topology 2x2", "does not fit v5e slices of 2x2"),
    (
        TRAIN + " --html nowhere/page.html",
        "--html nowhere/page.html cannot be written: No such file or directory.",
    ),
    (GOODPUT + " --write run.toml", "--write needs --step-time"),
    (GOODPUT + " --step-time 1s --write nowhere.toml", "config file nowhere.toml: No such file"),
    (GOODPUT.replace("2y", "soon"), "--host-mtbf soon: expected 30d"),
    (GOODPUT.replace("2y", "1s"), "leaves no time to train: 512 hosts"),
    (
        GOODPUT.replace("v5p", "v6e").replace("8x8x8", "8x8") + " --training-time 1d",
        "no price of v6e is known",
    ),
    ("roofline matmul 512 8k big --chip v5e", "F big: expected"),
    ("roofline matmul 512 8k 8k --chip v5e --precision fp64", "unknown precision 'fp64'"),
    (
        COLLECTIVE.replace("all-gather", "all-gahter"),
        "unknown collective 'all_gahter'. Did you mean 'all_gather'?",
    ),
    (COLLECTIVE + " --axes 5", "axis 5: 4x4 has axes 0 to 1"),
    (COLLECTIVE + " --chip-file nowhere.toml", "chip file nowhere.toml: No such file"),
    ("roofline copy 1GB --from 0,9 --to 3,3 --chip v5e --topology 4x4", "chip (0, 9) is not in a 4x4 slice"),
    (TRAIN.replace("4x4x4", "\u00b2x4x4"), "topology '\u00b2x4x4' is malformed: expected"),
    (TRAIN.replace("4x4x4", "v5p-" + "9" * 5000), "is not a slice"),
    (TRAIN.replace("8k", "1e30"), "--seq 1e30: expected at most 2^53"),
    (
        TRAIN.replace("v5p", "v5p,v6e"),
        "--chip v5p,v6e: expected one chip; several compete only in a plan with",
    ),
    (TRAIN.replace("v5p", "any"), "--chip any: expected one chip"),
    (SERVE.replace("v5e", "v5e,v5p"), "--chip v5e,v5p: expected one chip"),
    (TRAIN.replace("v5p", "v5p,,v6e") + " --tokens 1T --min-cost", "unknown chip ''"),
    (TRAIN.replace("v5p", "v5p,v6e") + " --tokens 1T --min-cost", "topology '4x4x4' has 3 dims but v6e"),
    (TRAIN.replace("v5p", "any") + " --topology 4x4x5 --tokens 1T --min-cost", "has no 4x4x5 slice"),
    (
        "plan --model llama3-8b --chip v5p,v5e --seq 8k --batch-tokens 4M --tokens 1T --min-cost --precision fp8",
        "v5e has no fp8 matrix unit",
    ),
    ([*words(TRAIN), "--precision", ""], "precision '': expected bf16, int8, fp8"),
    ([*words(TRAIN), "--remat", ""], "unknown remat_policy ''"),
    ([*words(TRAIN), "--write", ""], "config file '': "),
    ([*words(TRAIN), "--html", ""], "--html"),
    (TRAIN + " --max-chips 64", "--max-chips bounds a free search: give a goal"),
    ("plan run.toml --max-chips 64 --chip v5p --topology 4x4x4", "--max-chips does not go with RUN.toml"),
    (
        TRAIN + " remat_policy=full",
        "remat_policy=full: a key=value is of a config, and --model of none; write model=",
    ),
    (TRAIN + " --write nowhere/run.toml", "nowhere/run.toml cannot be written: No such file"),
    (
        "plan --model deepseek-v3 --chip v5e --seq 4k --batch-tokens 4M --tokens 1T --min-cost --max-chips 8",
        "no cluster among 7 can train deepseek-v3 with this batch; of the largest: deepseek-v3 does not fit on"
        " 1 x 2x4 v5e",
    ),
    (
        SERVE.replace("v5e", "v5p") + " --max-chips 2",
        "v5p has no slice of up to 2 chips; the smallest has 4.",
    ),
    (SERVE.replace("--latency-ms 30", "--latency-ms inf"), "latency = inf s: expected a time above 0"),
    (GOODPUT + " --price 3", "--price needs --training-time"),
    (GOODPUT + " --training-time 1d --price nan", "price nan: expected a price above 0"),
    (GOODPUT.replace("30s", "0"), "a checkpoint that costs nothing has no best interval: give the interval."),
    (COLLECTIVE + " --axes 0,0", "axes 0, 0: expected each axis once"),
    (COLLECTIVE + " --across-slices", "a collective across slices needs two slices or more"),
    (
        "roofline collective all-gather 1GB --chip h100 --topology 8 --axes 0",
        "the switched network of h100 has no physical axes",
    ),
    ([*SHARDED[:7], "X=\u00b2", *SHARDED[8:]], "expected one letter and its ways"),
]


@pytest.mark.parametrize(("command", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_is_one_sentence_with_the_way_out(command, message):
    said = refused(command)
    assert message in said
    assert said.count("\n") <= 1


def test_degrees_that_do_not_divide_the_heads_are_refused_with_the_nearest(tmp_path, say):
    run = tmp_path / "run.toml"
    say(TRAIN, "--write", str(run))
    where = "--chip v5p --topology 4x4x4"
    said = refused(f"plan {run} ici_tensor_parallelism=64 ici_fsdp_parallelism=1 {where}")
    assert "tensor = 64 does not divide the heads and hidden widths of llama3-8b; the nearest" in said
    assert "the ici_ axes multiply to 128" in refused(f"plan {run} ici_tensor_parallelism=2 {where}")
    assert "set compute_dtype=bfloat16" in refused(f"plan {run} compute_dtype=float32 {where}")


def test_a_plan_of_long_sequences_is_written_with_its_context_axis(say, tmp_path):
    run = tmp_path / "run.toml"
    say(f"plan --model llama3-8b --chip v5p --topology 4x4x4 --seq 1M --batch-tokens 1M --write {run}")
    parallelism = tomllib.loads(run.read_text())["parallelism"]
    assert parallelism["ici_context_parallelism"] > 1
    assert parallelism["context_strategy"] in ("all_gather", "ring", "ulysses")


def test_the_shell_gets_exit_code_2_and_one_line():
    command = [sys.executable, "-m", "slicewise", *TRAIN.replace("4x4x4", "4x4x5").split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("slicewise: v5p has no 4x4x5 slice")
    assert done.stderr.count("\n") == 1


def test_planning_imports_nothing_heavy():
    heavy = ("jax", "pandas", "plotly", "grain", "orbax", "slicewise.config", "tomlkit")
    code = (
        f"import sys; from slicewise.cli import main; main({TRAIN.split()!r});"
        f"print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
