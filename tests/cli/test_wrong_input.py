"""Wrong words on the command line: one sentence, exit code 2 and no traceback."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedcover as fc
from fedcover.runs.toml_fields import parse_change
from tests.helpers.command_line import changed, refused
from tests.helpers.runs import TINY


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--threads", "1.5"),
        ("run", "--processes", "1.5"),
        ("sweep", "e.toml", "--seeds", "0.9"),
    ],
)
def test_whole_number_options_are_not_rounded(words, fedcover):
    refused(fedcover(*words), 2, f"{words[-2]}: must be a whole number; got '{words[-1]}'")


WRONG = {
    ("run", "--set", "rounds"): "--set must look like key=value; got 'rounds'",
    ("run", "--set", "=3"): "--set must look like key=value; got '=3'",
    ("run", "--set"): "--set requires an argument",
    ("run", "--set", "nofield=1"): "an experiment's field must be one of .*; got 'nofield'",
    ("run", "--set", "rounds=many"): "rounds: .*; got 'many'",
    ("run", "--set", "rounds=0"): "rounds: .* greater than or equal to 1; got 0",
    ("run", "--set", "policy=rollin"): "policy must be one of .*, full, .*; got 'rollin'",
    (
        "run",
        "--set",
        "policy=rolling(spred=true)",
    ): "policy rolling has no option 'spred'; its options are: spread",
    ("run", "--set", "name=../up"): "name: .*; got '../up'",
    ("run", "--set", "dataset=digit"): "dataset must be one of digits, .*; got 'digit'",
    ("run", "missing.toml"): "experiment missing.toml cannot be read: No such file or directory",
    ("run", "."): "experiment . cannot be read: Is a directory",
    ("run", "invalid.toml"): "not valid TOML",
    ("run", "twice.toml"): "not valid TOML",
    ("run", "bytes.toml"): "experiment bytes.toml cannot be read: .*utf-8",
    ("run", "field.toml"): "an experiment's field must be one of .*; got 'round'",
    ("run", "type.toml"): "rounds: .*; got 'ten'",
    ("run", "a", "b"): "Unused Tokens",
    ("run", "--sett", "a=1"): "Unknown option: --sett",
    ("run", "--threads", "0"): "threads must be in 1..1024; got 0",
    ("run", "--threads", "x"): "threads: must be a whole number; got 'x'",
    ("run", "--device", "tpu"): "device must be one of auto, cpu, cuda, cuda:1; got 'tpu'",
    ("run", "--device", "cuda"): "no CUDA device",
    ("run", "--engine", "steam"): "engine must be one of auto, .*; got 'steam'",
    ("resume",): "requires an argument",
    ("export", "x", "--capacity", "much"): "unable to convert",
    ("demo", "--rounds", "0"): "rounds must be at least 1; got 0",
    ("demo", "--seed", "-1"): "seed: .*; got -1",
    ("list", "animals"): "list must be one of policies, .*; got 'animals'",
    ("audit", "1238"): "codename must consist of digits 1 to 7, one per slot; got '1238'",
    (
        "audit",
        "1",
        "--fleet",
        "2x1",
    ): "a codename has its own fleet and policy: leave --fleet out",
    ("audit", "1", "--capacity", "width"): "a codename has its own .*: leave --capacity out",
    ("audit", "--kind", "pruning", "--p5", "code"): "need a codename: leave --kind and --p5 out",
    ("audit", "paper", "--kind", "pruning"): "the paper's own tables: leave --kind out",
    ("audit", "paper", "--p5", "printed"): "the paper's own tables: leave --p5 out",
    ("audit", "paper", "--fleet", "2x1"): "the paper's own tables: leave --fleet out",
    ("audit", "paper", "--model", "cnn", "--batch-size", "5"): "leave --model and --batch-size out",
    ("audit", "1", "--kind", "x"): "kind must be one of pruning, subnet; got 'x'",
    ("audit", "1", "--p5", "x"): "p5 must be one of code, printed; got 'x'",
    ("audit", "--fleet", "2x2"): r"fleet must look like .*; got '2x2'",
    ("audit", "--capacity", "x"): "capacity: .*; got 'x'",
    ("audit", "--dataset", "x"): "dataset must be one of .*; got 'x'",
    ("data", "check", "x"): "dataset must be one of .*; got 'x'",
    ("data", "get", "x"): "dataset must be one of .*; got 'x'",
    ("dance",): 'Unknown command "dance"',
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_input_gives_one_sentence_and_exit_code_2(fedcover, words, tmp_path):
    for name, content in {
        "invalid": b"= 3",
        "twice": b"seed = 1\nseed = 2\n",
        "bytes": b"name = '\xff'",
        "field": b"round = 3",
        "type": b"rounds = 'ten'",
    }.items():
        (tmp_path / f"{name}.toml").write_bytes(content)
    refused(fedcover(*words), 2, WRONG[words])
    assert not (tmp_path / "runs").exists()


NASTY = [
    "",
    "''",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1.5",
    "1e400",
    "true",
    "[]",
    "[1]",
    "[[1]]",
    "{}",
    "{a=1}",
    "x",
    "a:b",
    ":",
    "a:",
    ".a:b",
    "os:path",
    "(",
    "a(",
    "f()",
    "f(x)",
    "prefix(1)",
    "prefix(**{})",
    "mlp(hidden=5)",
    "1979-05-27",
    "null",
    "😀",
    "\x7f",
    "a\nb",
    "a" * 300,
    "a(b={[1]: 2})",
    "(" * 500 + ")",
    "[/red]",
]


@pytest.mark.parametrize("field", [*fc.Experiment.model_fields, "nofield", "a.b"])
def test_odd_field_values_never_show_a_traceback(fedcover, field):
    outcomes = set()
    for value in NASTY:
        code, out, err = fedcover(
            "run",
            "--json",
            "--runs",
            f"runs{len(outcomes)}",
            *changed(**{"rounds": 1, field: value}),
        )
        assert code in (0, 1, 2)
        if code:
            assert err.splitlines()[-1].startswith("fedcover: ")
            assert (out, code == 2 or "holds a run" in err) == ("", True), err
        else:
            json.loads(out)
        outcomes.add(code)
    assert 2 in outcomes


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from(sorted(set(fc.Experiment.model_fields) - {"rounds", "epochs"})),
    value=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
)
def test_any_text_is_a_field_value_or_an_error(field, value):
    try:
        key, read = parse_change(f"{field}={value}")
        experiment = fc.Experiment(**{**TINY, key: read})
    except fc.FedcoverError:
        return
    assert fc.Experiment.from_toml(experiment.to_toml()) == experiment
