"""The same run on a CUDA device: equal to the CPU up to rounding, and to itself bit for bit where that is asked for."""

import pytest
import torch

import fedcover as fc
from fedcover.checkpoints import found
from tests.worlds import same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

IMAGES = {
    "dataset": "synthetic(shape=(3, 16, 16), samples=20, test_size=200)",
    "model": "wide_resnet(depth=10, widen=1)",
}
SETTINGS = {
    "prefix": {"policy": "prefix"},
    "random": {"policy": "random"},
    "magnitude": {"policy": "magnitude"},
    "planned": {"policy": "planned"},
    "images": {**IMAGES, "policy": "rolling(spread=true)"},
    "tracked": {**IMAGES, "policy": "prefix", "norm": "tracked"},
    "group": {**IMAGES, "policy": "prefix", "norm": "group"},
    "augmented": {**IMAGES, "policy": "full", "augment": "crop-flip"},
    "adam": {"policy": "prefix", "server": "adam"},
    "hermes": {"policy": "full", "recipe": "hermes"},
    "fjord": {"policy": "prefix", "recipe": "fjord"},
    "prunefl": {"policy": "prunefl(every=1)", "recipe": "prunefl"},
    "trimmed": {"policy": "prefix", "rule": "trimmed_mean(share=0.2)"},
    "heterofl": {"policy": "prefix", "absent_labels": "zero", "label_rows": True, "scaler": True, "clip": 1.0},
    "language": {"dataset": "characters", "model": "transformer(width=16, blocks=1, hidden=16)", "clients": 400},
}


def experiment(fields, rounds):
    defaults = {"fleet": "1x1.0 + 1x0.5", "clients": 20, "active": 4, "epochs": 1, "rounds": rounds, "lr": 0.02}
    return fc.Experiment(**{**defaults, **fields})


@pytest.fixture(autouse=True)
def exact_matmuls():
    """float32 as on the CPU."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("fields", SETTINGS.values(), ids=SETTINGS.keys())
def test_one_round_equals_the_cpu(fields):
    runs = [fc.run(experiment(fields, 1), machine=fc.Machine(device=device)) for device in ("cpu", "cuda")]
    left, right = (({name: t.cpu() for name, t in run.state.params.items()}) for run in runs)
    same(left, right, 2e-4)
    assert runs[0].gamma_min == runs[1].gamma_min


@pytest.mark.parametrize("name", ["prefix", "images", "magnitude"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name, tmp_path):
    machine = fc.Machine(device="cuda", deterministic=True)

    def stop(report):
        if report.round == 1:
            raise KeyboardInterrupt

    whole = fc.run(experiment(SETTINGS[name], 4), tmp_path / "whole", machine=machine)
    with pytest.raises(KeyboardInterrupt):
        fc.run(experiment(SETTINGS[name], 4), tmp_path / "stopped", machine=machine, watch=stop)
    resumed = fc.resume(tmp_path / "stopped")
    same(resumed.state.params, whole.state.params)
    last = [found(tmp_path / folder / "checkpoints")[0].digest for folder in ("whole", "stopped")]
    assert last[0] == last[1]
