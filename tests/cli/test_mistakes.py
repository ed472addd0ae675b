"""What first-time users stumbled over: each of these was once a traceback, or worse, a result
without a word.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.errors import RunError

TINY = {"clients": 20, "active": 4, "rounds": 1, "epochs": 1, "model": "mlp(hidden=[8])"}


def broken():
    return 1 / 0


def refused(message, *, parts=None, **fields):
    with pytest.raises(fc.InvalidValue, match=message):
        fc.run(fc.Experiment(**{**TINY, **fields}), **(parts or {}))


@pytest.mark.parametrize("partition", ["labels(limit=1)", "dirichlet(alpha=0.1)", "owner"])
def test_synthetic_data_is_not_partitioned(partition):
    refused(
        "partition: synthetic data is generated for each client",
        dataset="synthetic",
        partition=partition,
    )


def test_own_policy_must_not_exceed_a_capacity():
    @fc.per_client
    def greedy(view, client):
        return fc.windows(view.groups, 1.0)

    refused("more than its capacity of 0.5 holds", parts={"policy": greedy}, fleet="1x0.5")


def test_model_without_units_cannot_be_cut():
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    message = r"no units to cut, .*docs/tracing.md lists what is left whole"
    refused(message, parts={"model": bare}, fleet="1x0.5", policy="rolling")


def test_fleet_that_loses_its_small_devices_is_refused():
    refused("no device of capacity 0.5 is left", fleet="100x1 + 1x0.5")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "characters"}, "model .* cannot take data 'characters'"),
        ({"recipe": "depthfl"}, "needs a model with exits, such as depth_resnet"),
        ({"model": "depth_resnet(width=4, stages=2, blocks=1)"}, "exits need the recipe depthfl"),
        (
            {"recipe": "hermes", "policy": "prefix", "fleet": "1x0.5"},
            "recipe hermes .* needs the policy 'full'",
        ),
        (
            {"dataset": "synthetic(samples=1000000000000)"},
            "samples, sizes and shape must stay under",
        ),
        (
            {"dataset": "characters", "partition": "labels(limit=2)"},
            "needs one label for each sample",
        ),
        ({"recipe": "os:getcwd"}, "must make a fedcover Recipe; got str"),
        (
            {"recipe": "tests.cli.test_mistakes:broken"},
            "recipe .*broken' cannot be built: division by zero",
        ),
        (
            {"server": "tests.cli.test_mistakes:broken"},
            "server .*broken' cannot be built: division by zero",
        ),
    ],
    ids=lambda part: str(part)[:40],
)
def test_incompatible_fields_are_refused(fields, message):
    refused(message, **fields)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 7)),
            r"logits of shape \(2, 10\)",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(63, 16), nn.ReLU(), nn.Linear(16, 10)), "cannot"),
    ],
)
def test_own_model_of_wrong_output_is_refused(module, message):
    groups = (
        fc.UnitGroup(
            "hidden", 16, (fc.Cut("1.weight", 0), fc.Cut("1.bias", 0), fc.Cut("3.weight", 1))
        ),
    )
    refused(message, parts={"model": fc.Model(module, groups)})


@pytest.mark.parametrize("answer", [{}, 5, "part"])
def test_policy_must_give_reductions(answer):
    refused(
        "policy must give a Slices, a Masks or None",
        parts={"policy": lambda view: [answer] * len(view.cohort)},
    )
    refused("policy must give 4 reductions", parts={"policy": lambda view: []})


def test_run_from_a_file_has_a_short_repr(tmp_path):
    (tmp_path / "mine.toml").write_text("clients = 20\nactive = 4\nrounds = 1\nepochs = 1\n")
    run = fc.run(tmp_path / "mine.toml")
    assert repr(run).startswith("Run('mine', rounds=1, accuracy=0.")
    refused("policy must be a function here", parts={"policy": "prefix"})


class Alternating:
    def __init__(self, share=0.5):
        self.share = share

    def __call__(self, view):
        return [fc.windows(view.groups, self.share) for _ in view.cohort]


def test_policy_class_is_refused_but_its_object_works():
    refused(
        r"policy must be .* got the class Alternating: give an object of it",
        parts={"policy": Alternating},
    )
    refused("policy must be a function here .* got 0", parts={"policy": 0})
    assert fc.run(fc.Experiment(**TINY), policy=Alternating()).gamma_min == 0


@pytest.mark.parametrize("wrong", [3, "print", Alternating], ids=str)
def test_watcher_must_be_a_function(wrong, tmp_path):
    with pytest.raises(
        fc.InvalidValue, match="watch must be a function of a round's report, or None; got"
    ):
        fc.run(fc.Experiment(**TINY), tmp_path / "run", watch=wrong)
    assert not (tmp_path / "run").exists()
    fc.run(fc.Experiment(**TINY), tmp_path / "run")
    with pytest.raises(
        fc.InvalidValue, match="watch must be a function of a round's report, or None; got"
    ):
        fc.resume(tmp_path / "run", watch=wrong)


def test_failed_first_round_leaves_no_folder(tmp_path):
    with pytest.raises(fc.FedcoverError, match="diverged in round 0"):
        fc.run(fc.Experiment(**TINY, lr=1e29), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    fc.run(fc.Experiment(**TINY), tmp_path / "run")
    with pytest.raises(RunError, match="choose another name"):
        fc.run(fc.Experiment(**TINY), tmp_path / "run")


def test_data_folder_must_exist_and_is_in_the_manifest(tmp_path):
    with pytest.raises(fc.InvalidValue, match="data must be a folder that exists"):
        fc.run(fc.Experiment(**TINY), data=tmp_path / "typo")
    run = fc.run(fc.Experiment(**TINY), tmp_path / "run", data=tmp_path)
    assert run.folder is not None
    assert str(tmp_path.resolve()) in (run.folder / "manifest.json").read_text()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(64, 8), nn.Linear(8, 10)
        self.first.weight.requires_grad_(False)

    def forward(self, x):
        return self.head(self.first(x.flatten(1)))


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.sub_(0.5).flatten(1))


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Frozen, r"first\.weight has requires_grad = False \(1 such\); make it a buffer"),
        (Writing, "writes to its input"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(10)),
            "1.weight is lazy and has no shape yet",
        ),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(affine=False)),
            "1.running_mean is lazy",
        ),
        (lambda: fc.Model(nn.LazyLinear(10), ()), "weight is lazy and has no shape yet"),
        (lambda: fc.Model(nn.Linear(64, 10, dtype=torch.cfloat), ()), "weight is torch.complex64"),
    ],
)
def test_modules_that_cannot_be_averaged_are_refused(module, sentence):
    with pytest.raises(fc.InvalidValue, match=sentence):
        fc.run(
            fc.Experiment(rounds=1),
            model=model if isinstance(model := module(), fc.Model) else fc.Model(model, ()),
        )


def test_processes_and_clipping_are_refused_before_there_is_a_folder(tmp_path):
    experiment = fc.Experiment(rounds=1, clip_updates=1.0)
    with pytest.raises(fc.InvalidValue, match="processes must be 1 with clip_updates"):
        fc.run(experiment, tmp_path / "run", machine=fc.Machine(processes=2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dataset", ["digits", (torch.zeros(4, 2), torch.zeros(4))])
def test_dataset_of_another_type_is_refused(dataset):
    with pytest.raises(
        fc.InvalidValue,
        match=rf"^dataset must be a fedcover Dataset .*; got {type(dataset).__name__}$",
    ):
        fc.run(fc.Experiment(rounds=1), dataset=dataset)


def test_experiment_of_another_type_is_refused():
    with pytest.raises(
        fc.InvalidValue, match=r"^experiment must be an Experiment or a path; got dict$"
    ):
        fc.run({"rounds": 1})


def test_error_on_float64_models_names_a_working_fix():
    x, y = torch.rand(80, 8, dtype=torch.float64), torch.arange(80) % 4
    single = fc.from_tensors((x, y), (x, y))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    cure = (
        r"give module.float\(\), or x.double\(\) in a Dataset made by hand "
        r"\(from_tensors and files make float32"
    )
    refused(cure, parts={"dataset": single, "model": model}, policy="rolling", fleet="1x0.5")
    double = replace(single, train=replace(single.train, x=x), test=replace(single.test, x=x))
    run = fc.run(
        fc.Experiment(**TINY, policy="rolling", fleet="1x0.5"), dataset=double, model=model
    )
    assert {p.dtype for p in run.model().parameters()} == {torch.float64}


@pytest.mark.parametrize("capacity", [0, 1.5, -1, "0.5", None, float("nan")])
def test_capacity_outside_zero_to_one_is_refused(capacity):
    run = fc.run(fc.Experiment(policy="prefix", clients=10, active=2, rounds=1, epochs=1))
    with pytest.raises(fc.InvalidValue, match=r"^capacity must be in \(0, 1\]; got "):
        run.submodel(capacity)
