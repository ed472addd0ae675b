"""Compiled steps equal `sequential`, and without a compiler training still works."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import fedcover as fc
from fedcover.runs.setup import prepare_workload
from fedcover.training.engines import compilation, grouping
from fedcover.training.engines.batched import batched
from tests.helpers.engines import SEATED, TORCH_WARNS, UNCOMPILED, UNEQUAL, agree
from tests.helpers.worlds import world


@TORCH_WARNS
def test_compiled_stack_of_unequal_clients_equals_sequential():
    agree(*world("mlp", **{**UNEQUAL, **SEATED["whole"], "epochs": 1, "active": 4}), batched)


def test_auto_engine_compiles_only_long_runs():
    fields = {"dataset": "synthetic(samples=7)", "clients": 20, "active": 10, "batch_size": 3}
    short, long = (
        prepare_workload(fc.Experiment(**fields, rounds=rounds), "cpu") for rounds in (3, 100_000)
    )
    machine = fc.Machine(device="cpu").resolved()
    assert machine.for_workload(short).engine == "sequential"
    assert machine.for_workload(long).engine == "batched"
    assert replace(machine, engine="streams").for_workload(short).engine == "streams"


@TORCH_WARNS
def test_compiled_step_equals_sequential():
    agree(*world("mlp", policy="magnitude", fleet="1x0.5", clients=6, active=2, epochs=1), batched)


@TORCH_WARNS
def test_compiler_warnings_do_not_stop_it_where_warnings_are_errors():
    program = """
import fedcover as fc
fields = dict(model="mlp(hidden=[32])", clients=4, active=2, rounds=1, epochs=1)
fc.run(fc.Experiment(**fields), machine=fc.Machine(engine="batched", device="cpu", threads=1))
"""
    words = [
        sys.executable,
        "-W",
        "error",
        "-c",
        f"import logging\nlogging.basicConfig(level='INFO')\n{program}",
    ]
    log = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    assert "compiling, once" in log
    assert "cannot be compiled" not in log


def test_step_without_cpp_wrapper_is_compiled_with_a_python_one(monkeypatch, caplog):
    compile_step, tried = compilation._compile, []

    def only_in_python(step, leaves, options):
        tried.append(dict(options))
        if options:
            raise NotImplementedError("an operation that C++ cannot call")
        return compile_step(step, leaves, options)

    monkeypatch.setattr(compilation, "_compile", only_in_python)
    agree(*world("mlp", policy="magnitude", fleet="1x0.5", clients=6, active=2, epochs=1), batched)
    assert [bool(options) for options in tried] == [True, False]
    assert "cannot be compiled" not in caplog.text


def test_missing_compiler_makes_clients_train_in_turn_with_one_warning():
    program = """
import fedcover as fc
fields = dict(
    policy="magnitude", fleet="1x0.5", clients=20, active=2, rounds=2, epochs=1,
    model="mlp(hidden=[8])",
)
machines = [fc.Machine(engine=engine) for engine in ("sequential", "batched")]
runs = [fc.run(fc.Experiment(**fields), machine=machine) for machine in machines]
print(runs[0].summary["loss"] == runs[1].summary["loss"])
"""
    without = {"CXX": "no-such-compiler", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    command = [sys.executable, "-c", program]
    process = subprocess.run(
        command, env={**os.environ, **without}, capture_output=True, text=True, check=False
    )
    assert process.stdout == "True\n", process.stderr
    (lines,) = [line for line in process.stderr.splitlines() if line.startswith("engine:")]
    assert re.fullmatch(
        r"engine: the step cannot be compiled \(\w+\), so clients are trained one after another",
        lines,
    )


def test_number_of_compiled_shapes_is_limited(monkeypatch, caplog):
    monkeypatch.setattr(grouping, "MAX_SIGNATURES", 1)
    agree(
        *world("mlp", policy="prefix", fleet="1x1.0 + 1x0.5", clients=8, active=8, epochs=1),
        UNCOMPILED,
    )
    assert "there are more than 1 shapes of clients" in caplog.text
