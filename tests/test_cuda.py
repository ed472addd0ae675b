"""The same run on a CUDA device: equal to the CPU up to rounding, and to itself bit for bit where
that is asked for.
"""

import pytest
import torch

import fedcover as fc
from fedcover.errors import RunError
from fedcover.runs import checkpoints
from fedcover.runs.checkpoints import list_checkpoints
from fedcover.runs.sweep import expand_choices
from fedcover.server.grid_noise import keyed_stream
from fedcover.server.privacy import private_mean
from fedcover.submodels.reductions import Masks
from fedcover.training.engines.runners import RUNNER_POOL
from tests.helpers import kernel_twin
from tests.helpers.worlds import same

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
    "prunefl": {"policy": "prunefl(every=1)", "recipe": "prunefl(every=1)"},
    "trimmed": {"policy": "prefix", "rule": "trimmed_mean(share=0.2)"},
    "heterofl": {
        "policy": "prefix",
        "absent_labels": "zero",
        "label_rows": True,
        "scaler": True,
        "clip": 1.0,
    },
    "fiarse": {"policy": "magnitude(scope='model')", "recipe": "fiarse", "momentum": 0},
    "fiarse without surrogate": {
        "policy": "magnitude",
        "recipe": "fiarse(scope='layer', surrogate=false)",
    },
    "recurrent": {"dataset": "characters", "model": "lstm(embedding=4, hidden=8)", "clients": 400},
    "language": {
        "dataset": "characters",
        "model": "transformer(width=16, blocks=1, hidden=16)",
        "clients": 400,
    },
}


def experiment(fields, rounds):
    defaults = {
        "fleet": "1x1.0 + 1x0.5",
        "clients": 20,
        "active": 4,
        "epochs": 1,
        "rounds": rounds,
        "lr": 0.02,
    }
    return fc.Experiment(**{**defaults, **fields})


@pytest.fixture(autouse=True)
def exact_matmuls():
    """float32 as on the CPU."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop:UserWarning"
)  # attention under vmap
@pytest.mark.parametrize("engine", ["streams", "batched"])
@pytest.mark.parametrize("fields", SETTINGS.values(), ids=SETTINGS.keys())
def test_two_rounds_equal_the_reference_on_the_cpu(fields, engine):
    machines = fc.Machine("sequential", "cpu"), fc.Machine(engine, "cuda")
    runs = [fc.run(experiment(fields, 2), machine=machine) for machine in machines]
    left, right = (({name: t.cpu() for name, t in run.state.params.items()}) for run in runs)
    same(left, right, 2e-4)
    assert runs[0].gamma_min == runs[1].gamma_min


SHAPES = (
    (2, 3, 3, 16, 32, 3, 1, 1),
    (10, 10, 32, 32, 16, 3, 1, 1),
    (3, 10, 20, 37, 15, 3, 2, 1),
    (3, 5, 64, 128, 8, 1, 2, 0),
)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("clients", "images", "inputs", "outputs", "size", "side", "stride", "padding"), SHAPES
)
def test_kernels_of_a_crew_equal_their_slow_twin(
    clients, images, inputs, outputs, size, side, stride, padding, dtype
):
    triton_conv = pytest.importorskip("fedcover.training.engines.triton_conv")
    triton_norm = pytest.importorskip("fedcover.training.engines.triton_norm")
    kernels = {**vars(triton_conv), **vars(triton_norm)}
    torch.manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, device="cuda").to(dtype)

    x, weight = (
        drawn(clients, images, size, size, inputs),
        drawn(clients, side * side, inputs, outputs),
    )
    out = (size + 2 * padding - side) // stride + 1
    back, scale, shift = (
        drawn(clients, images, out, out, outputs),
        *torch.rand(2, clients, inputs, device="cuda"),
    )
    _, mean, spread = kernel_twin.batch_norm(x.double(), scale.double(), shift.double(), 1e-5)
    calls = {
        "convolve": ((x, weight, stride, padding, (out, out)), {"backward": False}),
        "convolve back": ((back, weight, stride, padding, (size, size)), {"backward": True}),
        "conv_weight_grad": ((x, back, side, stride, padding), {}),
        "batch_norm": ((x, scale, shift, 1e-5), {}),
        "batch_norm_backward": ((drawn(*x.shape), x, scale, mean.float(), spread.float()), {}),
    }
    for name, (arguments, how) in calls.items():
        function = name.split()[0]
        kernel, twin = kernels[function], getattr(kernel_twin, function)
        actual_outputs, again = kernel(*arguments, **how), kernel(*arguments, **how)
        wide = [value.double() if isinstance(value, torch.Tensor) else value for value in arguments]
        expected = twin(*wide, **how)
        for actual, repeated, want in zip(
            _all(actual_outputs), _all(again), _all(expected), strict=True
        ):
            assert torch.equal(actual, repeated)
            assert float((actual - want).norm() / want.norm()) < CLOSE[dtype], name


def _all(made):
    return made if isinstance(made, tuple) else (made,)


def test_images_are_trained_in_crews_by_default():
    task = fc.run(experiment(SETTINGS["images"], 1), machine=fc.Machine(device="cuda")).setup.task
    assert {
        place.workspace.step.stacked_kernels
        for place in RUNNER_POOL.cache_for(task).runners.values()
        if place.workspace.stack_size
    } == {True}


def test_captured_steps_are_reused_when_widths_change(caplog):
    """Capacities of devices: other widths in every cohort, and nothing is captured once every width
    was seen.
    """
    fields = {
        **SETTINGS["images"],
        "assignment": "device",
        "fleet": "1x1.0 + 1x0.5 + 1x0.25",
        "active": 6,
    }
    result = fc.run(experiment(fields, 12), machine=fc.Machine("streams", "cuda"))
    runners = RUNNER_POOL.cache_for(result.setup.task).runners
    assert len({place.workspace.signature for place in runners.values()}) == 3
    assert len(runners) <= 18
    assert not caplog.records


@pytest.mark.parametrize("engine", ["streams", "batched"])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_smaller_formats_stay_near_float32(engine, precision):
    fine, coarse = (
        fc.run(
            experiment(SETTINGS["images"], 1), machine=fc.Machine(engine, "cuda", precision=p)
        ).state.params
        for p in ("fp32", precision)
    )
    assert all(coarse[name].dtype == torch.float32 for name in coarse)
    distance = max(float((fine[name] - coarse[name]).abs().max()) for name in fine)
    assert 0 < distance < 0.05


@pytest.mark.parametrize(
    "name", ["prefix", "images"]
)  # crews; and large steps, run after run through the same graphs
def test_sweep_in_lockstep_equals_its_runs(name):
    base = experiment({**SETTINGS[name], "assignment": "slot"}, 2)
    for run in fc.sweep(
        expand_choices(base, {"lr": [0.02, 0.01]}, seeds=2), machine=fc.Machine(device="cuda")
    ):
        alone = fc.run(run.experiment, machine=fc.Machine("sequential", "cpu")).metrics
        assert [line["loss"] for line in run.metrics] == pytest.approx(
            [line["loss"] for line in alone], rel=1e-3
        )


@pytest.mark.parametrize("name", ["prefix", "images", "magnitude"])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name, tmp_path):
    machine = fc.Machine(device="cuda", deterministic=True)

    def stop(report):
        if report.round == 1:
            raise KeyboardInterrupt

    whole = fc.run(experiment(SETTINGS[name], 4), tmp_path / "whole", machine=machine)
    with pytest.raises(KeyboardInterrupt):
        fc.run(experiment(SETTINGS[name], 4), tmp_path / "stopped", machine=machine, watch=stop)
    resumed = fc.resume(tmp_path / "stopped")
    same(resumed.state.params, whole.state.params)
    last = [
        list_checkpoints(tmp_path / folder / "checkpoints")[0].digest
        for folder in ("whole", "stopped")
    ]
    assert last[0] == last[1]


def test_failed_write_beside_the_next_round_stops_the_run(tmp_path, monkeypatch):
    machine = fc.Machine(device="cuda", deterministic=True)
    save = checkpoints.save_checkpoint

    def full(folder, state, *others, **more):
        if state.round == 2:
            raise RunError("the disk is full")
        return save(folder, state, *others, **more)

    monkeypatch.setattr(checkpoints, "save_checkpoint", full)
    with pytest.raises(RunError, match="the disk is full; the checkpoint of round 1 is whole"):
        fc.run(experiment(SETTINGS["prefix"], 4), tmp_path / "stopped", machine=machine)
    monkeypatch.undo()
    resumed = fc.resume(tmp_path / "stopped")
    assert [line["round"] for line in resumed.metrics] == [0, 1, 2, 3]
    same(
        resumed.state.params,
        fc.run(experiment(SETTINGS["prefix"], 4), machine=machine).state.params,
    )


def test_private_noise_is_the_same_whole_numbers_as_on_the_cpu():
    """The noise is drawn on the CPU and counted in whole numbers, so the device cannot round it."""
    old = {"w": torch.ones(10_000, dtype=torch.float64)}
    masks = [Masks({"w": torch.arange(10_000) % 5 > client}) for client in range(4)]
    answers = []
    for device in ("cpu", "cuda"):
        here = {name: tensor.to(device) for name, tensor in old.items()}
        reductions = [Masks({"w": mask.bits["w"].to(device)}) for mask in masks]
        parts = [
            (mask, {n: t * (1 + i) for n, t in mask.extract(here).items()})
            for i, mask in enumerate(reductions)
        ]
        stream = keyed_stream(bytes(32))
        answers.append(private_mean(here, parts, clip=50.0, noise=1.7, stream=stream)["w"].cpu())
    torch.testing.assert_close(answers[1], answers[0], rtol=0, atol=1e-6)
    assert float((answers[0] - 1).abs().max()) > 50


def test_private_run_draws_other_noise_each_time():
    fields = {
        "policy": "rolling",
        "clip_updates": 0.5,
        "privacy": "gaussian(noise=2.0, delta=1e-4)",
    }
    left, right = (
        fc.run(experiment(fields, 2), machine=fc.Machine(device="cuda")) for _ in range(2)
    )
    assert left.summary["epsilon"] == right.summary["epsilon"] > 0
    moved = [left.state.params[name] - right.state.params[name] for name in left.state.params]
    assert float(torch.cat([tensor.flatten() for tensor in moved]).std()) > 0.01
