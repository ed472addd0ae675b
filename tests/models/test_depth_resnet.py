"""DepthFL: clients of different depth, exits after every stage, against loops written from the
definition.
"""

import pytest
import torch
from torch.nn import functional as F

import fedcover as fc
from fedcover.models.depth_resnet import depth_resnet
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.round import run_round
from fedcover.submodels.build import submodel
from fedcover.submodels.reductions import windows
from fedcover.training.local_sgd import train_client
from fedcover.types import Batch
from tests.helpers.worlds import same, world


def test_shallow_part_has_the_first_stages_and_its_own_exit():
    setup, state = world("depth_resnet")
    model, x = setup.task.model, setup.task.source.test.x[:4]
    whole = submodel(model.module, windows(model.groups, 1.0), state.params).train()
    half = submodel(model.module, windows(model.groups, 0.5), state.params).train()
    assert whole(x).shape == (4, 4, 3)
    torch.testing.assert_close(half(x), whole(x)[:2])
    torch.testing.assert_close(half.eval()(x), half.stages[1](half.stages[0](half.stem(x))[0])[1])
    assert not [
        name for name, _ in half.named_parameters() if name.startswith(("stages.2", "stages.3"))
    ]


def test_every_tensor_is_averaged_over_the_clients_deep_enough():
    setup, state = world("depth_resnet", policy="prefix", rounds=1, epochs=1)
    cohort = cohort_of(setup, 0)
    work = list(zip(cohort, setup.policy(view_of(setup, state, cohort)), strict=True))
    trained = [
        train_client(setup.task, state, client, part, setup.lr(0)).params for client, part in work
    ]
    after, report = run_round(setup, state)
    expected = {}
    for name, old in state.params.items():
        client_values = [params[name] for params in trained if name in params]
        expected[name] = torch.stack(client_values).mean(0) if client_values else old
    same(after.params, expected, 1e-12)
    depths = sorted(round(4 * client.capacity) for client in cohort)
    assert report.metrics["gamma_round"] == sum(depth == 4 for depth in depths)


def test_depthfl_loss_equals_its_definition():
    setup, state = world("depth_resnet", policy="full")
    logits = torch.randn(3, 5, 4, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 0])
    batch = Batch(torch.zeros(len(y), 1), y, 0)
    expected = 0.0
    for i in range(3):
        expected += F.cross_entropy(logits[i], y)
        for j in range(3):
            if i != j:
                p, q = logits[j].softmax(-1), logits[i].softmax(-1)
                expected += (p * (p.log() - q.log())).sum(-1).mean() / 2
    loss = setup.task.recipe.loss(lambda params, x: logits, state.params, batch, None)
    torch.testing.assert_close(loss, expected)


def test_inclusive_learning_trains_only_the_last_exit():
    setup, state = world(
        "depth_resnet", recipe="depthfl(exits='last')", fleet="1x0.5", policy="prefix"
    )
    after, _ = run_round(setup, state)
    for name in ("stages.0.exit.weight", "stages.3.exit.weight"):
        assert torch.equal(after.params[name], state.params[name])
    assert not torch.equal(
        after.params["stages.1.exit.weight"], state.params["stages.1.exit.weight"]
    )


def mixed_depths(**fields):
    """A round of InclusiveFL with clients of both depths, and what the shallow ones trained."""
    fields = {
        "recipe": "depthfl(exits='last')",
        "fleet": "1x1.0 + 1x0.5",
        "policy": "prefix",
        "active": 4,
        **fields,
    }
    setup, state = world("depth_resnet", **fields)
    cohort = cohort_of(setup, 0)
    work = list(zip(cohort, setup.policy(view_of(setup, state, cohort)), strict=True))
    shallow = [
        train_client(setup.task, state, c, part, setup.lr(0)).params
        for c, part in work
        if c.capacity == 0.5
    ]
    assert 0 < len(shallow) < len(cohort)
    after, _ = run_round(setup, state)
    return state, after, shallow


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("leaf", ["exit.weight", "exit.bias", "norm.weight", "norm.bias"])
def test_untrained_exit_does_not_dilute_shallower_clients(leaf, norm, weight_decay):
    _, after, shallow = mixed_depths(norm=norm, weight_decay=weight_decay)
    name = f"stages.1.{leaf}"
    same(
        {name: after.params[name]},
        {name: torch.stack([params[name] for params in shallow]).mean(0)},
        1e-12,
    )
    assert torch.unique(after.coverage.window[-1][name]).tolist() == [len(shallow)]


@pytest.mark.parametrize("leaf", ["exit.weight", "norm.weight"])
def test_weight_decay_leaves_untrained_exits_unchanged(leaf):
    state, after, _ = mixed_depths(weight_decay=0.1)
    assert torch.equal(after.params[f"stages.0.{leaf}"], state.params[f"stages.0.{leaf}"])
    assert not after.coverage.ever[f"stages.0.{leaf}"].any()


def test_model_without_named_exits_is_refused_where_only_the_last_learns():
    model = depth_resnet((1, 8, 8), 10, "batch", width=4, stages=2, blocks=1)
    unnamed = fc.Model(model.module, model.groups, classifier=model.classifier)
    experiment = fc.Experiment(
        recipe="depthfl(exits='last')", policy="prefix", fleet="1x0.5", rounds=1
    )
    with pytest.raises(fc.InvalidValue, match=r"names the parameters of each exit.*exits=\(\("):
        fc.run(experiment, model=unnamed)


def test_depth_resnet_learns_and_is_resumed(tmp_path):
    fields = {
        "model": ("depth_resnet(width=8, stages=3, blocks=1)"),
        "recipe": "depthfl",
        "policy": "prefix",
        "fleet": "1x1.0 + 1x0.67 + 1x0.34",
        "dataset": "digits",
        "clients": 6,
        "active": 6,
        "epochs": 1,
        "rounds": 3,
        "lr": 0.05,
    }
    run = fc.run(fc.Experiment(**fields), tmp_path / "run")
    assert run.accuracy > 0.5
    assert run.summary["accuracy_single"] == run.accuracy
    again = fc.load(tmp_path / "run")
    same(again.state.params, run.state.params)
    shallow = run.submodel(0.34)
    assert len([name for name, _ in shallow.named_parameters() if ".exit.weight" in name]) == 1
