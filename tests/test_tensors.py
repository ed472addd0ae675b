"""What is done to a slab in one go equals what is done tensor by tensor."""

import copy
import math
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover import tensors
from fedcover.runs import checkpoints
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import Overrides, prepare
from fedcover.server.aggregation import OVER, WeightedSums, coverage_mean, mean_from_sums
from fedcover.server.round import initial_state, run_round
from fedcover.submodels.reductions import Masks, Slices, TrainedSubset
from fedcover.tensors import FlatParams, concat, named_shapes
from fedcover.training.engines.batched import batched
from fedcover.training.engines.compilation import eager_backend
from fedcover.training.recipes.fedprox import cross_entropy
from fedcover.types import Cut, Engine, Model, Outcome, Recipe, UnitGroup
from tests.helpers.cutting import kept_units, layouts


def slab_of(params):
    return FlatParams(concat(params.values()), named_shapes(params))


def agree(slab, plain):
    assert slab.keys() == plain.keys()
    for name in plain:
        torch.testing.assert_close(slab[name], plain[name], rtol=0, atol=1e-12)


@settings(max_examples=100)
@given(
    layouts(),
    st.data(),
    st.sampled_from(["slices", "whole", "masks", "within"]),
    st.sampled_from([1.0, 0.5, -3.0]),
)
def test_slab_add_into_equals_tensors(layout, data, kind, scale):
    slices = Slices(
        layout.groups, {n: torch.tensor(u) for n, u in data.draw(kept_units(layout.groups)).items()}
    )
    bits = {name: torch.rand_like(t) > 0.5 for name, t in list(layout.params.items())[:1]}
    some = {
        name: torch.rand_like(t) > 0.5
        for name, t in list(slices.extract(layout.params).items())[:1]
    }
    reduction = {
        "slices": slices,
        "whole": Masks({}),
        "masks": Masks(bits),
        "within": TrainedSubset(slices, some),
    }[kind]
    values = {name: torch.randn_like(t) for name, t in reduction.extract(layout.params).items()}
    plain, slab = {name: t.clone() for name, t in layout.params.items()}, slab_of(layout.params)
    for names in (list(values), list(values)[:1], None):  # all of them, a few, only counting
        for target in (plain, slab):
            reduction.add_into(
                target, None if names is None else {n: values[n] for n in names}, scale
            )
        agree(slab, plain)
    assert torch.equal(slab.flat, concat(slab.values()))


@settings(max_examples=100)
@given(layouts(), st.data())
def test_slab_extract_equals_tensors(layout, data):
    part = Slices(
        layout.groups, {n: torch.tensor(u) for n, u in data.draw(kept_units(layout.groups)).items()}
    )
    result = part.extract(slab_of(layout.params))
    agree(result, part.extract(layout.params))
    assert torch.equal(result.flat, concat(result.values()))


def test_slab_extract_of_absent_or_whole_tensors():
    slab = slab_of({"w": torch.arange(8.0).view(4, 2), "head": torch.ones(3)})
    groups = (UnitGroup("g", 4, (Cut("w", 0), Cut("head", None, unit=3))),)
    agree(
        Slices(groups, {"g": torch.tensor([0, 2])}).extract(slab),
        {"w": torch.tensor([[0.0, 1.0], [4.0, 5.0]])},
    )
    agree(Slices(groups, {"g": torch.arange(4)}).extract(slab), dict(slab))


def one_round(recipe, engine, **fields):
    """A round of a small run with a user's recipe."""
    experiment = Experiment(
        dataset="digits",
        model="mlp(hidden=[8, 6])",
        fleet="1x1",
        clients=4,
        active=4,
        epochs=1,
        lr=0.1,
        rounds=1,
        calibration=50,
        policy="full",
        **fields,
    )
    setup = prepare(experiment, Machine(device="cpu", engine=engine).resolved())
    setup = replace(setup, task=replace(setup.task, recipe=recipe))
    return run_round(setup, initial_state(setup))[0]


def zeroed(assignment, forward, params, carry):
    """A `finish` that replaces the parameters it is given."""
    for name in params:
        params[name] = torch.zeros_like(params[name])
    return Outcome(params)


def descended(assignment, forward, params, carry):
    """A `finish` that takes one more step."""
    shard = assignment.task.source.shard(assignment.client.id)
    x, y = shard.samples.x[shard.index], shard.samples.y[shard.index]
    gradient = torch.func.grad(lambda p: torch.nn.functional.cross_entropy(forward(p, x), y))(
        params
    )
    return Outcome({name: p - 0.1 * gradient[name] for name, p in params.items()})


@pytest.mark.parametrize("finish", [zeroed, descended])
def test_slab_parameters_may_be_changed_by_recipes(monkeypatch, finish):
    recipe = Recipe(cross_entropy, finish=finish)
    expected = one_round(recipe, "sequential").params
    monkeypatch.setattr(tensors, "_on_gpu", bool)
    result = one_round(recipe, "streams").params
    for name in expected:
        torch.testing.assert_close(result[name], expected[name], rtol=1e-5, atol=1e-6)


def backwards(old, parts):
    """A rule that names tensors in another order."""
    mean = coverage_mean(old, parts)
    return {name: mean[name] for name in sorted(mean, reverse=True)}


def layerwise():
    """A server step that looks at a whole tensor."""
    return lambda tensor, memory: (tensor.old + (tensor.new - tensor.old) * tensor.old.norm(), {})


@pytest.mark.parametrize("own", [{"rule": backwards}, {"server": layerwise()}])
def test_slab_tensors_have_names_in_own_rules_and_servers(monkeypatch, own):
    def after():
        experiment = Experiment(
            dataset="digits",
            model="mlp(hidden=[8, 6])",
            fleet="2x1 + 2x0.5",
            clients=4,
            active=4,
            epochs=1,
            lr=0.1,
            rounds=1,
            calibration=50,
            policy="prefix",
        )
        setup = replace(prepare(experiment, Machine(device="cpu").resolved()), **own)
        return run_round(setup, initial_state(setup))[0].params

    plain = after()
    monkeypatch.setattr(tensors, "_on_gpu", bool)
    agree(after(), plain)


def test_slab_tensors_cannot_be_replaced():
    slab = slab_of({"w": torch.ones(2)})
    for change in (
        lambda: slab.update(w=torch.zeros(2)),
        lambda: slab.pop("w"),
        lambda: slab.__setitem__("w", torch.zeros(2)),
    ):
        with pytest.raises(TypeError, match="copy to a dict to replace them"):
            change()
    assert {**slab, "b": 1}.keys() == {"w", "b"}


def test_slab_views_are_copied_before_they_are_sent():
    recipe = Recipe(
        cross_entropy,
        finish=lambda a, f, params, c: Outcome(params, private={"b": params["head.bias"]}),
    )
    state = one_round(recipe, "streams")
    assert {
        t.untyped_storage().nbytes()
        for tensors_of_client in state.private.values()
        for t in tensors_of_client.values()
    } == {40}
    crew = FlatParams(torch.randn(50, 60)[3], [("w", (5, 10)), ("b", (10,))])
    assert len(pickle.dumps(tensors.to_device(crew, "cpu"))) < 2_000


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda slab: pickle.loads(pickle.dumps(slab))])
def test_slab_copy_has_its_own_memory(copied):
    rows = torch.randn(50, 60)  # as of a crew
    slab = FlatParams(rows[3], [("w", (5, 10)), ("b", (10,))])
    other = copied(slab)
    agree(other, slab)
    other.flat.zero_()
    assert not other["w"].any()
    assert slab["w"].any()
    assert other.flat.untyped_storage().nbytes() == 60 * 4
    assert len(pickle.dumps(slab)) < 2_000


def test_slab_needs_one_dtype(monkeypatch):
    monkeypatch.setattr(tensors, "_on_gpu", lambda values: True)
    mixed = {"w": torch.ones(2), "b": torch.ones(2, dtype=torch.float64)}
    assert tensors.flatten_if_cuda(mixed) is mixed
    agree(
        tensors.map_elementwise(
            torch.add, mixed, slab_of({"w": torch.ones(2), "b": torch.ones(2)})
        ),
        {"w": torch.full((2,), 2.0), "b": torch.full((2,), 2.0, dtype=torch.float64)},
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": "rolling(spread=true)", "engine": "batched"},
        {"policy": "prefix", "engine": "batched", "model": "wide_resnet(depth=10, widen=1)"},
        {"policy": "rolling(spread=true)", "server": "adam"},
        {"policy": "random", "server": "momentum", "uncovered": "zero", "window": 3},
        {"policy": "magnitude"},
        {"policy": "full", "recipe": "hermes"},
    ],
)
def test_slab_rounds_equal_tensor_rounds(monkeypatch, fields):
    def rounds():
        settings = {"model": "mlp(hidden=[8, 6])", **fields}
        in_crews = settings.pop("engine", None)
        experiment = Experiment(
            dataset="digits", fleet="2x1 + 2x0.5 + 2x0.25", clients=6, active=6,
            epochs=1, lr=0.1, rounds=3, calibration=50, **settings,
        )  # fmt: skip
        setup = prepare(experiment, Machine(device="cpu").resolved())
        setup = (
            replace(setup, engine=Engine(partial(batched, backend=eager_backend)))
            if in_crews
            else setup
        )
        state, lines = initial_state(setup), []
        for _ in range(3):
            state, report = run_round(setup, state)
            lines.append({key: value for key, value in report.metrics.items() if key != "seconds"})
        return state, lines

    plain, slab_rounds = rounds()
    monkeypatch.setattr(tensors, "_on_gpu", bool)
    slab, told_again = rounds()
    assert isinstance(slab.params, FlatParams)
    agree(slab.params, plain.params)
    agree(slab.coverage.ever, plain.coverage.ever)
    assert slab.server.keys() == plain.server.keys()
    for slot in plain.server:
        agree(slab.server[slot], plain.server[slot])
    for line, again in zip(slab_rounds, told_again, strict=True):
        noise, noise_again = line.pop("clients"), again.pop("clients")
        assert {c: pytest.approx(each) for c, each in noise.items()} == noise_again
        assert line.pop("delta2_mean") == pytest.approx(again.pop("delta2_mean"))
        assert line == again


def test_slab_counts_of_bytes_and_absent_tensors():
    layout = {"w": torch.zeros(4, 2), "head": torch.zeros(3)}
    groups = (UnitGroup("g", 4, (Cut("w", 0), Cut("head", None, unit=3))),)
    part = Slices(groups, {"g": torch.tensor([0, 2])})
    counts = slab_of({name: t.to(torch.uint8) for name, t in layout.items()})
    part.add_into(counts, None, 3)
    part.add_into(counts, None, 2)
    assert counts["w"].tolist() == [[5, 5], [0, 0], [5, 5], [0, 0]]
    assert counts["head"].tolist() == [0, 0, 0]
    for values in (None, {}):  # nothing but what is absent
        alone = slab_of({"head": layout["head"]})
        part.add_into(alone, values, 1.0)
        assert alone["head"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("over", OVER)
def test_slab_mean_equals_tensors(over):
    draw = torch.Generator().manual_seed(0)
    old = {"w": torch.randn(3, 4, generator=draw), "b": torch.randn(5, generator=draw)}
    total = {name: torch.randn(t.shape, generator=draw).double() for name, t in old.items()}
    weight = {
        name: torch.randint(0, 3, t.shape, generator=draw).double() for name, t in old.items()
    }
    total_weight = torch.tensor(4.0, dtype=torch.float64)
    plain = mean_from_sums(old, WeightedSums(total, weight, total_weight), over)
    slab = mean_from_sums(
        slab_of(old), WeightedSums(slab_of(total), slab_of(weight), total_weight), over
    )
    assert isinstance(slab, FlatParams)
    agree(slab, plain)


class Scaled(torch.nn.Module):
    """A network with a parameter that is a single number."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.head(torch.relu(self.hidden(x.flatten(1)))) * self.scale


@pytest.mark.parametrize("engine", ["sequential", "streams", "batched"])
def test_scalar_parameters_and_groups_as_lists_are_accepted(tmp_path, engine):
    groups = [
        UnitGroup(
            "hidden", 8, [Cut("hidden.weight", 0), Cut("hidden.bias", 0), Cut("head.weight", 1)]
        )
    ]
    experiment = Experiment(
        dataset="digits",
        fleet="1x1 + 1x0.5",
        clients=6,
        active=6,
        epochs=1,
        lr=0.1,
        rounds=1,
        calibration=50,
    )
    setup = prepare(
        experiment,
        Machine(device="cpu", engine=engine).resolved(),
        overrides=Overrides(model=Model(Scaled(), groups)),
    )
    state, _ = run_round(setup, initial_state(setup))
    checkpoints.save_checkpoint(tmp_path, state, "this")
    again, _ = checkpoints.load_newest(tmp_path, "this", "cpu")
    assert again.params["scale"].item() == state.params["scale"].item() != 1.0
    assert again.coverage.ever["scale"].shape == ()


@pytest.mark.parametrize("size", [(tensors.PIECE["cpu"] + 3,), (1025, 1024)])
def test_in_pieces_equals_one_call(size):
    one, two = torch.randn(size), torch.randn(size, dtype=torch.float64)

    def quotient(first, second):
        return {"ratio": first / second, "larger": first > second}

    actual = tensors.in_pieces(quotient)(one, two)
    for key, expected in quotient(one, two).items():
        assert torch.equal(actual[key], expected)


@pytest.mark.parametrize("over", OVER)
def test_mean_of_large_tensors_equals_the_mean_of_rows(over):
    groups = (UnitGroup("g", 1100, (Cut("w", 0),)),)
    old = {"w": torch.randn(1100, 1000)}
    reductions = [
        Masks({}),
        Masks({"w": torch.rand(1100, 1000) > 0.5}),
        Slices(groups, {"g": torch.arange(500)}),
    ]
    parts = [
        (r, {n: v + torch.randn(v.shape) for n, v in r.extract(old).items()}, 3.0)
        for r in reductions
    ]
    actual = coverage_mean(old, parts, over=over)["w"]
    for row in (0, 499, 500, 1099):
        few = {"w": old["w"][row : row + 1]}
        row_groups = (UnitGroup("g", 1, (Cut("w", 0),)),)
        there = torch.arange(int(row < 500))
        masks = Masks({"w": reductions[1].bits["w"][row : row + 1]})
        small = [Masks({}), masks, Slices(row_groups, {"g": there})]
        row_parts = [
            (r, {"w": v["w"][row : row + 1]}, s) for r, (_, v, s) in zip(small, parts, strict=True)
        ]
        assert torch.equal(coverage_mean(few, row_parts, over=over)["w"][0], actual[row])


def test_norm_of_views_of_one_tensor_is_that_of_separate_tensors_bit_for_bit():
    plain = {name: torch.randn(size) for name, size in (("a", (7, 9)), ("b", (30,)), ("c", ()))}
    length = tensors.norm(slab_of(plain).values())
    assert length == tensors.norm(plain.values())
    assert length == pytest.approx(float(concat(plain.values()).double().norm()))


def test_norms_are_summed_in_float64_and_do_not_hide_what_is_not_finite():
    tiny = [torch.full((10_000,), 1e-3), torch.tensor(1e4)]
    exact = 1e4**2 + 10_000 * float(tiny[0][0]) ** 2
    assert tensors.squared_norm(tiny) == pytest.approx(exact, rel=1e-15)
    assert tensors.norm([]) == 0
    assert tensors.norm([torch.ones(2), torch.tensor(torch.inf)]) == float("inf")
    assert math.isnan(tensors.norm([torch.tensor(torch.nan), torch.ones(2)]))


def test_copies_and_zeros_have_memory_of_their_own():
    slab = slab_of({"w": torch.ones(2, 3), "b": torch.ones(3)})
    for result in (tensors.clone(slab), tensors.zeros_like(slab, torch.float64)):
        assert named_shapes(result) == named_shapes(slab)
        assert len({tensor.untyped_storage().data_ptr() for tensor in result.values()}) == 2
        result["w"] = result["w"] + 1  # may be replaced, unlike the views
    assert tensors.zeros_like(slab, torch.float64)["w"].dtype == torch.float64
    assert tensors.zeros_like({"n": torch.ones(2, dtype=torch.int32)})["n"].dtype == torch.int32


def test_tensors_move_together():
    slab = slab_of({"w": torch.ones(2, 3), "b": torch.ones(3)})
    moved = tensors.to_device(slab, "meta")
    assert isinstance(moved, FlatParams)
    assert tensors.device_of(moved).type == "meta"
    assert tensors.device_of(tensors.to_device(dict(slab), "meta")).type == "meta"
