"""What Flower carries, and the folder of an app, without Flower: parcels, settings, logs,
programs.
"""

import os
import subprocess
import sys
import time
import tomllib

import numpy as np
import pytest
import torch

from fedcover.cli import console
from fedcover.cli import flower as commands
from fedcover.errors import InvalidValue, RunError
from fedcover.flower.app_template import RunConfig, write_app
from fedcover.flower.connections import check_connection
from fedcover.flower.monitor import stream_log
from fedcover.flower.payloads import (
    decode_reduction,
    encode_reduction,
    expected_part,
    gather_kept,
    prefix_names,
    scatter_kept,
    unpack_sections,
)
from fedcover.host.orphans import descendants
from fedcover.models import MODELS
from fedcover.runs.api import run
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.metrics_log import count_unanswered
from fedcover.runs.run_folder import Folder
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.raw_arrays import ArraySpec
from fedcover.server.round import RoundReport
from fedcover.server.safetensors_codec import pack_arrays
from fedcover.submodels.reductions import Masks, drawn, windows
from fedcover.training.engines import ENGINES
from tests.helpers.worlds import world

CUT = {
    "windows": lambda m: windows(m.groups, 0.5, {g.name: 3 for g in m.groups}),
    "draw": lambda m: drawn(m.groups, 0.5, key=7),
    "mask": lambda m: Masks(
        {n: torch.rand_like(m.module.get_parameter(n)) > 0.5 for n in m.prunable}
    ),
    "mask of some": lambda m: Masks(
        {m.prunable[-1]: torch.rand_like(m.module.get_parameter(m.prunable[-1])) > 0.5}
    ),
    "whole": lambda m: Masks({}),
}


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.parametrize("name", ["mlp", "wide_resnet"])
def test_encoded_part_is_the_same_bits(name, cut):
    model = MODELS[name]((3, 8, 8), 10, "batch")
    params = {n: p.detach() for n, p in model.module.named_parameters()}
    params[next(iter(params))].view(-1)[0] = -0.0
    encoded, wire = encode_reduction(CUT[cut](model), model)
    encoded_bytes = gather_kept(wire, wire.extract(params))
    payload = pack_arrays(prefix_names({"params": encoded_bytes}))
    there = decode_reduction(encoded, model)
    restored = unpack_sections(payload, {"params": expected_part(there, params)})["params"]
    full = scatter_kept(there, restored, params, "cpu")
    expected, result = wire.extract(params), there.extract(full)
    assert expected.keys() == result.keys()
    for n, tensor in expected.items():
        assert tensor.numpy().tobytes() == result[n].numpy().tobytes(), n
    numbers = sum(t.numel() for t in encoded_bytes.values())
    assert (
        len(payload) < 4 * numbers + 120 * len(encoded_bytes) + 24
    )  # nothing but the part, and names


@pytest.mark.parametrize(
    "policy", ["prefix", "rolling(spread=true)", "random", "magnitude", "planned"]
)
def test_encoded_reduction_keeps_the_policys_masks(policy):
    setup, state = world("mlp", policy=policy)
    for part in setup.policy(view_of(setup, state, cohort_of(setup, 0))):
        encoded, wire = encode_reduction(part, setup.task.model)
        if policy in ("prefix", "rolling(spread=true)", "random"):
            assert len(encoded) <= 1 + 8 * max(2, len(setup.task.model.groups))
        for name, mask in part.mask(state.params).items():
            assert mask.equal(wire.mask(state.params)[name])


def test_mask_of_an_unprunable_tensor_cannot_be_encoded():
    model = MODELS["mlp"]((1, 8, 8), 10, "batch")
    other = next(n for n, _ in model.module.named_parameters() if n not in model.prunable)
    bits = torch.ones_like(model.module.get_parameter(other), dtype=torch.bool)
    with pytest.raises(InvalidValue, match="prunable"):
        encode_reduction(Masks({other: bits}), model)


def test_payload_must_hold_the_expected_tensors():
    payload = pack_arrays({"params/w": np.zeros(3, np.float32)})
    with pytest.raises(InvalidValue, match="other tensors"):
        unpack_sections(
            payload, {"params": {"w": ArraySpec((3,), "float32"), "b": ArraySpec((1,), "float32")}}
        )


def test_written_app_reads_back_its_config(tmp_path):
    config = RunConfig(
        Experiment(policy='regions(codename="1122")', active=4).to_toml(),
        '/some \U0001f331\n"where"',
        nodes=3,
    )
    project = tomllib.loads((write_app(tmp_path, config) / "pyproject.toml").read_text())
    assert RunConfig.read(project["tool"]["flwr"]["app"]["config"]) == config
    assert (tmp_path / "LICENSE").is_file()


def test_unknown_superlink_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    for name in ("fleet", None):
        with pytest.raises(
            InvalidValue,
            match=rf"connection must be one of \(none yet\); got {name!r}: .*superlink\.",
        ):
            check_connection(name)
    (tmp_path / "config.toml").write_text(  # as Flower writes it: its default simulates
        '[superlink]\ndefault = "local"\n'
        '[superlink.supergrid]\naddress = "there"\n[superlink.local]\naddress = ":local:"\n'
    )
    for name in ("local", None):
        with pytest.raises(InvalidValue, match=r"connection must be one of supergrid; got 'local'"):
            check_connection(name)
    (tmp_path / "config.toml").write_text(
        '[superlink]\ndefault = "fleet"\n[superlink.fleet]\naddress = "here:1"\n'
    )
    check_connection("fleet")
    check_connection(None)
    for unknown in ("local", "default"):
        with pytest.raises(InvalidValue, match="connection must be one of fleet; got"):
            check_connection(unknown)


def test_engine_flower_in_one_process_names_flower_up(tmp_path):
    experiment = Experiment(clients=4, active=2, rounds=1, epochs=1)
    with pytest.raises(InvalidValue, match="fedcover flower up"):
        run(experiment, tmp_path / "run", machine=Machine("flower"))
    assert not (tmp_path / "run").exists()


def test_stream_log_fails_unless_the_server_reports_the_end(capfd):
    def streamed(text):
        return stream_log([sys.executable, "-c", f"print({text!r})"], dict(os.environ))

    streamed("hello\nfedcover: finished: runs/x")
    with pytest.raises(RunError, match="its log is above"):
        streamed(
            "fedcover: round 1: client 3 rejected: its node says: 'fedcover: finished: runs/x'"
        )
    with pytest.raises(RunError, match=r"^no room$"):
        streamed("fedcover: stopped: no room\nTraceback")
    output = capfd.readouterr().out
    assert "hello" in output
    assert "Traceback" not in output  # what Flower makes of a sentence that is said already


def test_log_stream_ends_with_its_reader():
    """A kill while the log is passed on must not leave the streaming process behind."""
    script = "import time; print('begun', flush=True); time.sleep(60)"
    reader = f"""
import signal, sys
from fedcover.flower.monitor import stream_log
def stop(number, frame): raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
try: stream_log([sys.executable, "-c", {script!r}], {{}})
except KeyboardInterrupt: sys.exit(130)
"""
    with subprocess.Popen(
        [sys.executable, "-c", reader], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        family = descendants([process.pid])
        process.terminate()
        assert process.wait(30) == 130
    assert family
    assert not family & descendants([os.getpid()])


def test_functions_beside_the_experiment_file_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(
        commands, "require_supported", lambda: None
    )  # these refusals need no Flower
    (tmp_path / "beside_flower.py").write_text("def alternating(view):\n    return {}\n")
    (tmp_path / "own.toml").write_text(
        'policy = "beside_flower:alternating"\nclients = 4\nactive = 2\n'
    )
    with pytest.raises(InvalidValue, match="nodes must be in"):
        commands.up(tmp_path / "own.toml", nodes=99)
    with pytest.raises(InvalidValue, match="nodes must be in"):
        commands.run(tmp_path / "own.toml", nodes=99)


def test_up_refuses_impossible_runs_before_it_starts_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "require_supported", lambda: None)
    monkeypatch.setattr(
        commands, "run_local_federation", lambda *arguments: pytest.fail("a federation is started")
    )
    experiment = Experiment(clients=4, active=2, rounds=1, epochs=1)
    (tmp_path / "own.toml").write_text(experiment.to_toml())
    with pytest.raises(
        InvalidValue, match="device must be one of auto, cpu, cuda, cuda:1; got 'gpu'"
    ):
        commands.run(tmp_path / "own.toml", server=commands.ServerOptions(device="gpu"))
    run(
        experiment, tmp_path / "run", machine=Machine("flower", "cpu"), engine=ENGINES["sequential"]
    )
    with (
        Folder(tmp_path / "run").opened(),
        pytest.raises(RunError, match="run is in use by another process"),
    ):
        commands.up(tmp_path / "run")


def test_progress_counts_missing_answers(capsys):
    line = {"gamma_round": 0, "gamma_window": 0, "seconds": {}, "rejected": 3, "late": 0, "lost": 2}
    with console.show_progress("mine", 2) as watch:
        watch(RoundReport(0, line))
    assert "coverage 0 (window 0)  3 rejected  2 lost" in capsys.readouterr().err
    assert count_unanswered([line, {**line, "late": 1}]) == {"rejected": 6, "late": 1, "lost": 4}
    assert count_unanswered([{}]) == {}


def test_descendants_are_found_without_ps(monkeypatch):
    """Small containers have no `ps`, and what is not found is not stopped."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as parent:
        monkeypatch.setenv("PATH", "")
        while not (result := descendants([parent.pid])):
            time.sleep(0.05)
        assert parent.pid not in result
        assert result < descendants([os.getpid()])
        parent.communicate(b"\n")
    assert not result & descendants([os.getpid()])
