"""Exported sub-models answer as the run's own."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch import nn

import fedcover as fc
from fedcover.errors import InvalidValue, RunError
from fedcover.runs.checkpoints import list_checkpoints
from fedcover.runs.export import export
from tests.helpers.python_parts import own_model, small_dataset
from tests.helpers.runs import RESNET, tiny

EXPORTED = {
    "prefix": {},
    "random": {"policy": "random"},
    "magnitude": {"policy": "magnitude"},
    "pruned regions": {"policy": "regions(codename='1177')", "fleet": "2x1 + 2x0.5"},
    "regions of units": {
        "policy": "regions(codename='1155', kind='subnet')",
        "fleet": "2x1 + 2x0.5",
    },
    "batch norm": RESNET,
    "tracked norm": {"norm": "tracked", **RESNET},
    "width norm": {"norm": "per-width", **RESNET},
}


@pytest.mark.parametrize("fields", EXPORTED.values(), ids=EXPORTED.keys())
def test_exported_part_equals_the_runs_part(tmp_path, fields):
    run = fc.run(tiny(rounds=1) if not fields else tiny(**{**fields, "rounds": 1}))
    test_x = run.setup.task.source.test.x[:50]
    for capacity in (1.0, 0.5):
        path = tmp_path / f"{capacity}.safetensors"
        report = export(run, capacity, path)
        loaded = fc.load_part(path)
        assert not loaded.training
        with torch.no_grad():
            expected = run.submodel(capacity)(test_x)
            assert torch.equal(loaded(test_x), expected)
        assert report["stored"] == sum(p.numel() for p in loaded.parameters())
        assert (
            report["parameters"]
            <= report["stored"]
            <= sum(p.numel() for p in run.model().parameters())
        )
        if capacity == 1:
            assert torch.equal(run.model()(test_x), expected)
        else:
            assert report["parameters"] < sum(p.numel() for p in run.model().parameters())


def test_export_refuses_wrong_capacities_and_paths(tmp_path, finished):
    run = fc.load(finished)
    for capacity in (0, -1, 1.5, float("nan")):
        with pytest.raises(InvalidValue, match=r"capacity must be in \(0, 1\]; got"):
            export(run, capacity, tmp_path / "x")
    full = fc.run(tiny(policy="full", rounds=1))
    with pytest.raises(
        InvalidValue, match=r"no part for a device of capacity 0\.5: its policy 'full'"
    ):
        full.submodel(0.5)
    with pytest.raises(RunError, match=r"cannot write .*No such file"):
        export(run, 1.0, tmp_path / "no" / "x")
    assert list(tmp_path.iterdir()) == []


def test_load_part_refuses_other_files(tmp_path, finished):
    garbage, plain = tmp_path / "garbage", tmp_path / "plain.safetensors"
    garbage.write_bytes(b"\x00" * 100)
    safetensors.torch.save_file({"a": torch.zeros(1)}, plain)
    for path in (garbage, tmp_path / "missing", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(RunError, match="cannot be read"):
            fc.load_part(path)
    for path in (plain, list_checkpoints(finished / "checkpoints")[0].path):
        with pytest.raises(RunError, match="is not a model exported by fedcover"):
            fc.load_part(path)


def test_exported_part_of_own_model_needs_that_model(tmp_path):
    model, path = own_model(), tmp_path / "part"
    run = fc.run(tiny(rounds=1), dataset=small_dataset(), model=model)
    export(run, 0.5, path)
    with pytest.raises(
        RunError, match=r"does not hold a part of model 'mlp\(hidden=\[16\]\)' \(if it was made in"
    ):
        fc.load_part(path)
    with pytest.raises(RunError, match="does not hold a part of the given model"):
        fc.load_part(
            path,
            model=replace(
                own_model(), module=nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
            ),
        )
    x = run.setup.task.source.test.x
    assert torch.equal(fc.load_part(path, model=model)(x), run.submodel(0.5)(x))
