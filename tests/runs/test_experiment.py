"""Descriptions of runs: TOML in and out, one clear sentence for every wrong value, and an
identity.
"""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.errors import InvalidValue
from fedcover.runs.experiment import Experiment, read_experiment
from fedcover.runs.toml_fields import parse_change
from fedcover.training.recipes.label_masking import ABSENT_LABELS

NAN, INF = float("nan"), float("inf")
plain = st.characters(exclude_categories=["Cs"])
positive = st.floats(min_value=1e-300, max_value=1e30)
share = st.floats(0, 1, exclude_max=True)

FIELDS = {
    "name": st.text(string.ascii_letters + string.digits + "._-", max_size=20).map(
        lambda s: f"a{s}"
    ),
    "seed": st.integers(0, 2**63 - 1),
    "dataset": st.text(plain, max_size=20),
    "partition": st.sampled_from(["iid", "labels(limit=2)", "dirichlet(alpha=0.5)", "owner"]),
    "validation": share,
    "calibration": st.integers(1, 10**6),
    "augment": st.sampled_from(["none", "crop-flip"]),
    "clients": st.integers(50, 10**9),
    "active": st.integers(30, 50),
    "fleet": st.lists(st.tuples(st.integers(1, 9), st.floats(1e-6, 1)), min_size=1, max_size=3).map(
        lambda kinds: " + ".join(f"{n}x{c:.12f}" for n, c in kinds)
    ),
    "assignment": st.sampled_from(["device", "slot"]),
    "capacity": st.sampled_from(["width", "parameters"]),
    "drop_out": share,
    "model": st.sampled_from(
        ["mlp", "mlp(hidden=[8, 6])", "wide_resnet(depth=10)", "fedcover.models:cnn"]
    ),
    "norm": st.sampled_from(["batch", "tracked", "per-width", "group"]),
    "scaler": st.booleans(),
    "policy": st.sampled_from(
        ["full", "rolling(spread=true)", "magnitude(scope='model')", "random"]
    ),
    "recipe": st.sampled_from(["plain", "prox", "fjord"]),
    "absent_labels": st.sampled_from(sorted(ABSENT_LABELS)),
    "label_rows": st.booleans(),
    "rule": st.sampled_from(["coverage_mean", "trimmed_mean", "median"]),
    "weights": st.sampled_from(["uniform", "samples"]),
    "uncovered": st.sampled_from(["keep", "zero"]),
    "server": st.sampled_from(["none", "momentum", "adam"]),
    "average": st.sampled_from(["none", "window", "ema"]),
    "clip_updates": st.none() | positive,
    "privacy": st.just("none"),
    "rounds": st.integers(1, 10**9),
    "epochs": st.integers(1, 100),
    "batch_size": st.integers(1, 10**6),
    "lr": positive,
    "schedule": st.sampled_from(["constant", "cosine", "steps(at=[5, 8], factor=0.5)"]),
    "momentum": share,
    "weight_decay": st.floats(0, 1e30),
    "clip": st.none() | positive,
    "window": st.integers(1, 100),
    "evaluation": st.sampled_from(["calibrated", "batch-compat"]),
    "evaluate_every": st.integers(1, 100),
    "local_every": st.none() | st.integers(1, 100),
    "checkpoint_every": st.integers(1, 100),
    "keep_rounds": st.lists(st.integers(0, 1), max_size=3),
}


def test_strategy_covers_every_field():
    assert set(FIELDS) == set(Experiment.model_fields)


@settings(max_examples=150)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_experiment_survives_toml(fields):
    if fields.get("assignment") == "slot":
        fields.setdefault(
            "active", 30
        )  # among ten slots a kind of device may find no place, which is refused
    experiment = Experiment(**fields)
    text = experiment.to_toml()
    again = Experiment.from_toml(text)
    assert again == experiment
    assert again.digest == experiment.digest
    assert again.to_toml() == text
    for key, value in fields.items():
        if key not in ("fleet", "keep_rounds"):
            assert getattr(again, key) == value


ESCAPED = st.sampled_from(
    [*map(chr, range(32)), "\x7f", "\x85", "\u2028", '"', "'", "\\", "\U0001f600"]
)


@given(st.text(plain | ESCAPED))
def test_dataset_names_survive_toml(dataset):
    experiment = Experiment(dataset=dataset)
    assert Experiment.from_toml(experiment.to_toml()) == experiment


def test_toml_of_earlier_versions_is_read():
    text = 'dataset = "a\\tb\\u001f\\u007f"\nlr = 1e-05\nkeep_rounds = [1, 2]\n'
    assert Experiment.from_toml(text) == Experiment(
        dataset="a\tb\x1f\x7f", lr=1e-5, keep_rounds=(1, 2)
    )


def test_defaults_are_written_as_they_are_read():
    assert Experiment(fleet="1x1.0") == Experiment() == Experiment.from_toml("")
    assert Experiment(fleet="1x1.0").digest == Experiment().digest


def test_fleet_capacity_one_third_is_exact():
    fleet = Experiment(fleet="1x1/3").scaled_fleet
    assert fleet.capacities == (1 / 3,)


ZERO = "greater than or equal to 1"
WRONG = [
    *(
        (field, value, what)
        for field in (
            "calibration",
            "clients",
            "active",
            "rounds",
            "epochs",
            "batch_size",
            "window",
            "evaluate_every",
            "local_every",
            "checkpoint_every",
        )
        for value, what in [
            (0, ZERO),
            (-1, ZERO),
            ("x", "valid integer"),
            (1.5, "valid integer"),
            (INF, "finite"),
            (NAN, "finite"),
            ([1], "valid integer"),
            ("", "valid integer"),
        ]
    ),
    *(
        (field, value, what)
        for field in ("validation", "drop_out", "momentum")
        for value, what in [
            (1, "less than 1"),
            (-0.1, "greater than or equal to 0"),
            (NAN, "less than 1"),
            (INF, "less than 1"),
            ("x", "valid number"),
            (None, "valid number"),
        ]
    ),
    *(
        (field, value, "valid string")
        for field in (
            "dataset",
            "partition",
            "augment",
            "fleet",
            "model",
            "norm",
            "policy",
            "rule",
            "weights",
            "schedule",
            "evaluation",
            "recipe",
            "absent_labels",
            "uncovered",
            "server",
            "privacy",
        )
        for value in (5, None, ["x"], True, {"a": 1})
    ),
    *(
        (field, value, "must be one of")
        for field in (
            "augment",
            "norm",
            "rule",
            "weights",
            "evaluation",
            "policy",
            "model",
            "partition",
            "schedule",
            "recipe",
            "absent_labels",
            "uncovered",
            "server",
            "privacy",
        )
        for value in ("", "nosuch", "x y", "é")
    ),
    *(
        (field, f"nosuch{tail}", "must look like name or name")
        for field in (
            "policy",
            "model",
            "partition",
            "schedule",
            "recipe",
            "rule",
            "server",
            "privacy",
        )
        for tail in ("(", "(1)", "(x=y.z)", "(x=1)(y=2)")
    ),
    *(("assignment", value, "'device' or 'slot'") for value in ("", "x", 1, None)),
    *(("capacity", value, "'width' or 'parameters'") for value in ("", "x", 1, None)),
    *(
        ("name", value, "match pattern")
        for value in ("", ".", "..", ".x", "a/b", "a b", "a\n", "é", "-x", "\x00")
    ),
    ("name", "x" * 101, "at most 100 characters"),
    *(
        ("seed", value, what)
        for value, what in [(-1, "than or equal to 0"), (0.5, "valid integer"), (NAN, "finite")]
    ),
    *(
        (field, value, "valid boolean")
        for field in ("scaler", "label_rows")
        for value in ("maybe", 2, None, "")
    ),
    *(
        ("lr", value, what)
        for value, what in [
            (0, "greater than 0"),
            (-1, "greater than 0"),
            (NAN, "finite"),
            (INF, "finite"),
            ("x", "valid number"),
            (None, "valid number"),
        ]
    ),
    *(
        ("weight_decay", value, what)
        for value, what in [(-1, "than or equal to 0"), (NAN, "finite"), (INF, "finite")]
    ),
    *(
        (field, value, what)
        for field in ("clip", "clip_updates")
        for value, what in [(0, "than 0"), (NAN, "finite"), (INF, "finite"), ("x", "number")]
    ),
    *(("fleet", value, "must look like '4x1.0") for value in ("", "0x1", "4x0", "4x1.5", "nosuch")),
    *(
        ("keep_rounds", value, what)
        for value, what in [
            ([-1], "0..rounds"),
            ([101], "0..rounds"),
            (5, "valid tuple"),
            ("x", "valid tuple"),
            ([1.5], "integer"),
            ([None], "integer"),
        ]
    ),
    ("active", 101, "at most clients (100)"),
]


def test_error_on_active_says_that_it_is_the_default():
    with pytest.raises(
        InvalidValue, match=r"^active must be at most clients \(4\); got 10, the default$"
    ):
        Experiment(clients=4)
    with pytest.raises(InvalidValue, match=r"^active must be at most clients \(4\); got 5$"):
        Experiment(clients=4, active=5)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    WRONG,
    ids=lambda part: str(part)[:20].encode("unicode_escape").decode(),
)
def test_error_names_field_value_and_what_is_allowed(field, value, what):
    with pytest.raises(InvalidValue) as exc_info:
        Experiment(**{field: value})
    sentence = str(exc_info.value)
    assert "\n" not in sentence
    assert sentence.startswith(field)
    assert what in sentence
    invalid = value[0] if isinstance(value, list) and sentence.startswith(f"{field}.") else value
    assert sentence.endswith(f"got {invalid!r}")


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("policy", "rolling(x=1)", "policy rolling has no option 'x'; its options are: spread"),
        (
            "policy",
            "regions",
            r"policy regions needs the option 'codename': regions\(codename=...\)",
        ),
        (
            "policy",
            "homogeneous(share='x')",
            "policy homogeneous: share: input should be a valid number.*; got 'x'",
        ),
        ("model", "mlp(hidden=3)", "model mlp: hidden: .*; got 3"),
        (
            "model",
            "wide_resnet(depth='x')",
            "model wide_resnet: depth: input should be a valid integer.*; got 'x'",
        ),
        ("model", "nosuch:f", "model 'nosuch:f' cannot be imported: No module named 'nosuch'"),
        ("partition", "labels", r"partition labels needs the option 'limit': labels\(limit=...\)"),
        (
            "partition",
            "labels(limit='x')",
            "partition labels: limit: input should be a valid integer.*; got 'x'",
        ),
        ("schedule", "steps(at=5)", "schedule steps: at: input should be a valid list; got 5"),
    ],
)
def test_wrong_options_are_refused_by_the_experiment(field, value, sentence):
    with pytest.raises(InvalidValue, match=rf"^{sentence}$"):
        Experiment(**{field: value})


def test_unknown_field_lists_the_known_ones():
    with pytest.raises(InvalidValue, match=r"field must be one of name, seed, .*; got 'round'"):
        Experiment(round=3)


def test_experiment_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Experiment().rounds = 3


CHANGED = {
    "seed": 1,
    "dataset": "mnist",
    "partition": "owner",
    "validation": 0.1,
    "calibration": 7,
    "augment": "crop-flip",
    "clients": 99,
    "active": 9,
    "fleet": "2x0.5",
    "assignment": "slot",
    "capacity": "parameters",
    "drop_out": 0.1,
    "model": "cnn",
    "norm": "group",
    "scaler": True,
    "policy": "prefix",
    "weights": "samples",
    "rounds": 99,
    "epochs": 4,
    "batch_size": 9,
    "lr": 0.02,
    "schedule": "cosine",
    "momentum": 0.4,
    "weight_decay": 0.1,
    "clip": 1.0,
    "window": 9,
    "evaluation": "batch-compat",
    "evaluate_every": 2,
    "local_every": 5,
    "rule": "median",
    "recipe": "prox",
    "absent_labels": "zero",
    "label_rows": True,
    "uncovered": "zero",
    "server": "adam",
    "average": "ema",
    "clip_updates": 1.0,
}
TOGETHER = {"privacy": "gaussian(noise=1.0)", "clip_updates": 1.0}
"""What cannot be changed alone."""
UNCHANGED = {"name": "other", "checkpoint_every": 7, "keep_rounds": [1, 2]}


def test_digest_covers_what_is_computed():
    assert set(CHANGED) | set(TOGETHER) | set(UNCHANGED) == set(Experiment.model_fields)
    digests = {Experiment(**{field: value}).digest for field, value in CHANGED.items()}
    digests |= {Experiment(**TOGETHER).digest, Experiment().digest}
    assert len(digests) == len(CHANGED) + 2
    assert Experiment(**UNCHANGED).digest == Experiment().digest
    assert len(Experiment().digest) == 16


def test_codename_brings_its_fleet():
    policy = "regions(codename='1111447')"
    experiment = Experiment(policy=policy)
    assert (experiment.fleet, experiment.assignment, experiment.active) == (
        "4x1 + 2x0.75 + 1x0.5",
        "slot",
        7,
    )
    assert experiment.scaled_fleet.counts == (4, 2, 1)
    assert Experiment.from_toml(experiment.to_toml()) == experiment
    assert (
        Experiment(policy=policy, fleet="4x1.0 + 2x3/4 + 1x.5", assignment="slot", active=7)
        == experiment
    )
    assert Experiment(policy="regions(codename='1414')").fleet == "1x1 + 1x0.75 + 1x1 + 1x0.75"


@pytest.mark.parametrize(
    ("field", "value"), [("fleet", "7x1.0"), ("assignment", "device"), ("active", 10)]
)
def test_fields_that_contradict_a_codename_are_refused(field, value):
    with pytest.raises(
        InvalidValue, match=f"^{field} follows from the codename .*: leave it out; got"
    ):
        Experiment(policy="regions(codename='1111447')", **{field: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("codename=1234", "policy regions: codename: input should be a valid string; got 1234"),
        ("codename='128'", "codename must consist of digits 1 to 7, one per slot; got '128'"),
        ("codename=''", "codename must consist of digits 1 to 7, one per slot; got ''"),
        ("codename='12', kind='x'", "kind must be one of pruning, subnet; got 'x'"),
        ("codename='12', p5='x'", "p5 must be one of code, printed; got 'x'"),
        (f"codename='{'1' * 101}'", r"active must be at most clients \(100\); got 101"),
    ],
)
def test_wrong_codenames_are_refused_by_the_experiment(options, message):
    with pytest.raises(InvalidValue, match=f"^{message}$"):
        Experiment(policy=f"regions({options})")


def test_scaled_fleet_has_a_place_per_client_or_slot():
    by_device = Experiment(fleet="1x1.0 + 1x0.5", clients=30, active=4)
    assert by_device.scaled_fleet.counts == (15, 15)
    assert Experiment(
        fleet="1x1.0 + 1x0.5", clients=30, active=4, assignment="slot"
    ).scaled_fleet.counts == (2, 2)


def test_changes_apply_before_checks():
    assert Experiment.from_toml("rounds = 0\nlr = 0.5", {"rounds": 3}).rounds == 3


@pytest.mark.parametrize(
    "text", ["rounds", "= 1", "a = [1", "x = 1\nx = 2", "a = " + "[" * 3000, "a = " + "9" * 5000]
)
def test_invalid_toml_is_refused(text, tmp_path):
    with pytest.raises(InvalidValue, match=r"^the experiment is not valid TOML: "):
        Experiment.from_toml(text)
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=r"^the experiment is not valid TOML: "):
        read_experiment(path)


def test_experiment_is_named_after_its_file(tmp_path):
    path = tmp_path / "first.toml"
    path.write_text("rounds = 7")
    assert read_experiment(path) == Experiment(name="first", rounds=7)
    assert read_experiment(path, {"name": "second", "rounds": 8}) == Experiment(
        name="second", rounds=8
    )
    path.write_text("name = 'own'")
    assert read_experiment(path).name == "own"


def test_unreadable_experiment_files_are_refused(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "nosuch.toml", tmp_path / "binary.toml"):
        with pytest.raises(InvalidValue, match=r"^experiment .* cannot be read: "):
            read_experiment(path)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("rounds=50", "rounds", 50),
        (" rounds = 50 ", "rounds", 50),
        ("lr=1e-3", "lr", 0.001),
        ("scaler=true", "scaler", True),
        ("scaler=yes", "scaler", "yes"),
        ("policy=rolling(spread=true)", "policy", "rolling(spread=true)"),
        ("policy='rolling'", "policy", "rolling"),
        ("fleet=4x1.0 + 6x0.75", "fleet", "4x1.0 + 6x0.75"),
        ("model=mlp(hidden=[8, 6])", "model", "mlp(hidden=[8, 6])"),
        ("keep_rounds=[1, 2]", "keep_rounds", [1, 2]),
        ("name=", "name", ""),
        ("name=2024-01-01", "name", "2024-01-01"),
        ("name=1\nrounds=2", "name", "1\nrounds=2"),
        ("name={a = 1}", "name", "{a = 1}"),
        ("name=" + "[" * 3000, "name", "[" * 3000),
        ("seed=" + "9" * 5000, "seed", "9" * 5000),
        ("dataset=a=b", "dataset", "a=b"),
    ],
    ids=lambda part: str(part)[:20].encode("unicode_escape").decode(),
)
def test_command_line_changes_are_parsed(text, key, value):
    assert parse_change(text) == (key, value)


@pytest.mark.parametrize("text", ["", "rounds", "=5", " = 5"])
def test_text_that_is_no_change_is_refused(text):
    with pytest.raises(InvalidValue, match=r"^--set must look like key=value; got "):
        parse_change(text)


@settings(max_examples=100)
@given(st.text(max_size=20))
def test_any_text_is_a_change_or_refused(text):
    try:
        key, _ = parse_change(text)
    except InvalidValue:
        return
    assert key == text.partition("=")[0].strip()


def test_run_name_is_made_from_any_file_name(tmp_path):
    path = tmp_path / "my exp (2).toml"
    path.write_text("rounds = 2\n")
    assert read_experiment(path).name == "my-exp-2"
    path.write_text('name = "my exp"\n')  # who says a name is taken at their word
    with pytest.raises(InvalidValue, match="name"):
        read_experiment(path)
