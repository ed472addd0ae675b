"""What Flower carries and who holds whom, without Flower: parcels, places, and the folder of an app."""

import json
import os
import platform
import subprocess
import sys
import time
import tomllib
import tracemalloc
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover import console
from fedcover.arrays import Refused, Wanted
from fedcover.cli import flower as commands
from fedcover.cli.flower import check_connection, node_configs
from fedcover.datasets import load
from fedcover.engines import ENGINES
from fedcover.errors import InvalidValue, RunError
from fedcover.experiment import Experiment
from fedcover.flower import places as node_places
from fedcover.flower.apps import Settings, write_app
from fedcover.flower.following import follow, pass_on, said
from fedcover.flower.memory import NO_CACHES
from fedcover.flower.parcels import (
    as_sent,
    bundle,
    headed,
    kept,
    read_reduction,
    received,
    sections,
    unbundle,
    wanted_part,
)
from fedcover.flower.places import Introduction, Roster, declared_fleet, introduction, place_of
from fedcover.flower.rows import scale_of
from fedcover.flower.scales import Scale
from fedcover.folders import Folder
from fedcover.models import MODELS
from fedcover.orphans import descendants
from fedcover.preparation import Machine
from fedcover.reduction import Masks, drawn, windows
from fedcover.rounds import Report, cohort_of, view_of
from fedcover.runs import run
from fedcover.summary import unanswered
from tests.worlds import world

CUT = {
    "windows": lambda m: windows(m.groups, 0.5, {g.name: 3 for g in m.groups}),
    "draw": lambda m: drawn(m.groups, 0.5, key=7),
    "mask": lambda m: Masks({n: torch.rand_like(m.module.get_parameter(n)) > 0.5 for n in m.prunable}),
    "mask of some": lambda m: Masks({m.prunable[-1]: torch.rand_like(m.module.get_parameter(m.prunable[-1])) > 0.5}),
    "whole": lambda m: Masks({}),
}


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.parametrize("name", ["mlp", "wide_resnet"])
def test_a_part_that_travels_is_the_same_bits(name, cut):
    model = MODELS[name]((3, 8, 8), 10, "batch")
    params = {n: p.detach() for n, p in model.module.named_parameters()}
    params[next(iter(params))].view(-1)[0] = -0.0
    encoded, wire = as_sent(CUT[cut](model), model)
    sent = kept(wire, wire.extract(params))
    parcel = bundle(headed({"params": sent}))
    there = read_reduction(encoded, model)
    got = sections(parcel, {"params": wanted_part(there, params)})["params"]
    full = received(there, got, params, "cpu")
    expected, found = wire.extract(params), there.extract(full)
    assert expected.keys() == found.keys()
    for n, tensor in expected.items():
        assert tensor.numpy().tobytes() == found[n].numpy().tobytes(), n
    numbers = sum(t.numel() for t in sent.values())
    assert len(parcel) < 4 * numbers + 250 * len(sent) + 8  # nothing but the part, and names


@pytest.mark.parametrize("policy", ["prefix", "rolling(spread=true)", "random", "magnitude", "planned"])
def test_the_encoding_gives_back_what_the_policy_gave(policy):
    setup, state = world("mlp", policy=policy)
    for part in setup.policy(view_of(setup, state, cohort_of(setup, 0))):
        encoded, wire = as_sent(part, setup.task.model)
        if policy in ("prefix", "rolling(spread=true)", "random"):
            assert len(encoded) <= 1 + 8 * max(2, len(setup.task.model.groups))
        for name, mask in part.mask(state.params).items():
            assert mask.equal(wire.mask(state.params)[name])


def test_a_mask_of_what_is_never_pruned_cannot_travel():
    model = MODELS["mlp"]((1, 8, 8), 10, "batch")
    other = next(n for n, _ in model.module.named_parameters() if n not in model.prunable)
    bits = torch.ones_like(model.module.get_parameter(other), dtype=torch.bool)
    with pytest.raises(InvalidValue, match="prunable"):
        as_sent(Masks({other: bits}), model)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content):
    with suppress(InvalidValue):
        assert isinstance(unbundle(content), dict)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_parcel_is_read_or_refused(data):
    parcel = bytearray(bundle({"params/w": np.arange(5, dtype=np.float32), "params/b": np.zeros(2)}))
    for _ in range(data.draw(st.integers(1, 8))):
        parcel[data.draw(st.integers(0, len(parcel) - 1))] = data.draw(st.integers(0, 255))
    with suppress(InvalidValue):
        assert all(isinstance(name, str) for name in unbundle(bytes(parcel)))


MIB = 2**20
INDICES = {
    "lists in lists": lambda n: b"[" * n,
    "empty lists": lambda n: b"[" + b"[], " * (n // 4),
    "rows": lambda n: b"[" + b", ".join(b'["%d", "a", [], 0]' % i for i in range(n // 24)) + b"]",
    "rows of a name that is wanted": lambda n: b"[" + b", ".join([b'["w", "float32", [1], 0]'] * (n // 27)) + b"]",
    "a shape": lambda n: b'[["w", "float32", [' + b", ".join([b"1"] * (n // 3)) + b"], 0]]",
    "a name": lambda n: b'[["' + b"w" * n + b'", "float32", [], 0]]',
    "quotes": lambda n: b'[["' + b"\\u0041" * (n // 6) + b'", "float32", [], 0]]',
    "a number": lambda n: b'[["w", "float32", [], ' + b"9" * n + b"]]",
}


@pytest.mark.parametrize("kind", INDICES)
def test_an_index_is_refused_in_at_most_twice_its_bytes(kind):
    index = INDICES[kind](4 * MIB - 100)
    parcel = len(index).to_bytes(8, "little") + index
    assert 3 * MIB < len(parcel) < 4 * MIB + 100
    tracemalloc.start()
    try:
        with pytest.raises((InvalidValue, Refused)):
            unbundle(parcel, {"w"})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(parcel)


@given(st.dictionaries(st.text(max_size=20), st.lists(st.integers(0, 3), max_size=3), max_size=5))
def test_what_is_bundled_is_there_again(shapes):
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    found = unbundle(bundle(arrays), set(arrays))
    assert {name: (array.dtype, array.shape) for name, array in found.items()} == {
        name: ("float32", shape) for name, shape in shapes.items()
    }


def test_a_parcel_must_hold_what_is_wanted():
    parcel = bundle({"params/w": np.zeros(3, np.float32)})
    with pytest.raises(InvalidValue, match="other tensors"):
        sections(parcel, {"params": {"w": Wanted((3,), "float32"), "b": Wanted((1,), "float32")}})


@given(st.integers(1, 200), st.integers(1, 20))
def test_every_place_holds_neighbours_and_nearly_the_same_number(clients, places):
    held = [place_of(client, clients, places) for client in range(clients)]
    assert held == sorted(held)
    counts = np.bincount(held, minlength=places)
    assert max(held) < places
    assert counts.max() - counts.min() <= 1 or places > clients


def test_nodes_say_who_they_are_or_what_is_wrong():
    assert introduction(7, {"partition-id": 1, "num-partitions": 2, "capacity": 1}, "v").capacity == 1.0
    assert introduction(7, {}, "v").partition == "no partition"
    for wrong in (
        {"num-partitions": 2},
        {"partition-id": 0},
        {"partition-id": 2, "num-partitions": 2},
        {"partition-id": "0", "num-partitions": 2},
    ):
        with pytest.raises(InvalidValue, match="partition-id=K"):
            introduction(7, wrong, "v")
    with pytest.raises(InvalidValue, match="capacity"):
        introduction(7, {"partition-id": 0, "num-partitions": 2, "capacity": 1.5}, "v")


def test_a_scale_is_told_in_one_digit_or_makes_no_sense():
    assert Scale.read([0.0, 254.7, 33.31, 78.6]) == Scale(0.0, 300.0, 30.0, 80.0)
    assert Scale.read(None) is None
    for wrong in (
        "0123",
        [0.0],
        [0, 1, 2, 3],
        [0.0, float("nan"), 0.0, 1.0],
        [2.0, 1.0, 1.0, 1.0],
        [0.0, 1.0, 1.0, -1.0],
    ):
        with pytest.raises(ValueError, match="no scale"):
            Scale.read(wrong)
    assert scale_of(torch.zeros(0, 3)) is None


@pytest.mark.parametrize(
    "change", [lambda x: x * 255, lambda x: x * 0, lambda x: x + 9, lambda x: (x - x.mean()) / 0.1]
)
def test_another_scale_is_noticed_and_other_rows_are_not(change):
    x = load("digits").train.x
    mine = scale_of(x)
    assert scale_of(change(x)).differs(mine)
    for label in range(10):
        assert not scale_of(x[load("digits").train.y == label]).differs(mine)


def test_a_place_belongs_to_the_first_that_answers_for_it():
    roster = Roster()
    roster.add(Introduction(7, 0, 2, None, "v"))
    roster.add(Introduction(8, 1, 2, None, "v"))
    roster.add(Introduction(9, 1, 2, None, "v"))
    assert roster.holders({7, 8, 9}) == {0: 7, 1: 8}  # a second claim takes nothing from a node that works
    roster.silent.add(8)
    assert roster.holders({7, 8, 9}) == {0: 7, 1: 9}
    assert roster.holders({8}) == {1: 8}  # better silent than nobody
    with pytest.raises(InvalidValue, match="num-partitions"):
        roster.add(Introduction(10, 0, 3, None, "v"))


def test_a_node_that_holds_too_little_for_a_run_that_has_begun_is_refused():
    roster = Roster(capacities=[0.25, 0.25, 0.25, 1.0, 0.5])
    roster.add(Introduction(7, 0, 2, 0.25, "v"))
    roster.add(Introduction(8, 1, 2, None, "v"))  # it does not say what it holds
    roster.add(Introduction(9, 1, 2, 1.0, "v"))
    with pytest.raises(InvalidValue, match=r"at least 1, as the clients of partition 1 .* got 0\.5"):
        roster.add(Introduction(10, 1, 2, 0.5, "v"))
    assert set(roster.known) == {7, 8, 9}


def anywhere(node, capacity=None):
    """A node that names no place."""
    return introduction(node, {} if capacity is None else {"capacity": capacity}, "v")


def test_a_node_that_names_no_place_gets_one_that_nobody_has():
    roster = Roster(places=3)
    roster.add(anywhere(7), {7, 8, 9})
    roster.add(Introduction(8, 1, 3, None, "v"), {7, 8, 9})
    roster.add(anywhere(9), {7, 8, 9})
    assert roster.holders({7, 8, 9}) == {0: 7, 1: 8, 2: 9}
    roster.add(anywhere(7), {7, 8, 9})  # it is asked again, and keeps its place
    assert roster.holders({7, 8, 9}) == {0: 7, 1: 8, 2: 9}
    assert roster.known[9].partition == "partition 2 of 3"


def test_a_spare_node_takes_the_place_of_one_that_is_gone_or_silent():
    roster = Roster(places=2)
    for node in (7, 8, 9, 10):
        roster.add(anywhere(node), {7, 8, 9, 10})
    assert roster.holders({7, 8, 9, 10}) == {0: 7, 1: 8}
    roster.fill({8, 9, 10})
    assert roster.holders({8, 9, 10}) == {0: 9, 1: 8}
    roster.silent.add(8)
    roster.fill({8, 9, 10})
    assert roster.holders({8, 9, 10}) == {0: 9, 1: 10}
    roster.add(Introduction(11, 0, 2, None, "v"), {8, 9, 10, 11})  # one that names a place is never moved
    roster.fill({8, 11})
    assert roster.holders({8, 11}) == {0: 11, 1: 8}


def test_a_node_that_names_no_place_gets_one_that_it_can_hold():
    roster = Roster(places=2, capacities=[1.0, 1.0, 0.25, 0.25])
    roster.add(anywhere(7, 0.5), {7})
    assert roster.holders({7}) == {1: 7}
    with pytest.raises(InvalidValue, match=r"capacity must be at least .* got 0\.1"):
        roster.add(anywhere(8, 0.1), {7, 8})
    roster.fill({7})
    assert roster.holders({7}) == {1: 7}  # too small for the other


def test_where_nodes_must_name_their_place():
    with pytest.raises(InvalidValue, match="how many nodes share the clients"):
        Roster().add(anywhere(7))
    with pytest.raises(InvalidValue, match="its clients are the same whenever it comes"):
        Roster(places=2, wanted=node_places.Wanted(4, 2, (3,))).add(anywhere(7))
    unlimited = Roster(unlimited=True)
    for node in (7, 8, 9):
        unlimited.add(anywhere(node), {7, 8, 9})
    assert unlimited.holders({7, 8, 9}) == {0: 7, 1: 8, 2: 9}
    assert unlimited.known[9].partition == "partition 2"


def test_the_fleet_is_what_the_nodes_declare():
    wanted = Experiment(clients=8, active=4, fleet="1x1.0 + 1x0.5")
    configs = node_configs(wanted, 2)
    assert [config["capacity"] for config in configs] == [1.0, 0.5]
    known = [wanted.scaled_fleet.capacity(client) for client in range(8)]
    said_so = [Introduction(n, n, 2, config["capacity"], "v") for n, config in enumerate(configs)]
    assert declared_fleet(said_so, 8, known) == "4x1.0 + 4x0.5"
    assert all("capacity" not in config for config in node_configs(wanted, 1))  # one node with two kinds


def test_of_two_nodes_that_claim_one_place_the_first_counts_for_everything():
    claims = [Introduction(7, 0, 2, 1.0, "v"), Introduction(8, 1, 2, 0.5, "v"), Introduction(9, 0, 2, 0.25, "v")]
    roster = Roster()
    for claim in claims:
        roster.add(claim)
    assert roster.holders([9, 8, 7]) == {0: 7, 1: 8}
    assert declared_fleet(roster.known.values(), 4, [1.0] * 4) == "2x1.0 + 2x0.5"


def test_the_app_of_an_experiment_reads_back(tmp_path):
    told = Settings(
        Experiment(policy='regions(codename="1122")', active=4).to_toml(), '/some \U0001f331\n"where"', nodes=3
    )
    project = tomllib.loads((write_app(tmp_path, told) / "pyproject.toml").read_text())
    assert Settings.read(project["tool"]["flwr"]["app"]["config"]) == told
    assert (tmp_path / "LICENSE").is_file()


def test_a_superlink_that_flower_does_not_know_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    for name in ("fleet", None):
        with pytest.raises(InvalidValue, match=rf"connection must be one of \(none yet\); got {name!r}: .*superlink\."):
            check_connection(name)
    (tmp_path / "config.toml").write_text(  # as Flower writes it: its default simulates
        '[superlink]\ndefault = "local"\n'
        '[superlink.supergrid]\naddress = "there"\n[superlink.local]\naddress = ":local:"\n'
    )
    for name in ("local", None):
        with pytest.raises(InvalidValue, match=r"connection must be one of supergrid; got 'local'"):
            check_connection(name)
    (tmp_path / "config.toml").write_text('[superlink]\ndefault = "fleet"\n[superlink.fleet]\naddress = "here:1"\n')
    check_connection("fleet")
    check_connection(None)
    for unknown in ("local", "default"):
        with pytest.raises(InvalidValue, match="connection must be one of fleet; got"):
            check_connection(unknown)


def test_in_this_process_the_engine_flower_says_where_it_works(tmp_path):
    wanted = Experiment(clients=4, active=2, rounds=1, epochs=1)
    with pytest.raises(InvalidValue, match="fedcover flower up"):
        run(wanted, tmp_path / "run", machine=Machine("flower"))
    assert not (tmp_path / "run").exists()


def test_the_last_sentence_of_a_log_is_what_a_user_sees(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("INFO : hello\nfedcover: stopped: cannot write x: No space left\nINFO : bye\n")
    assert said(log) == "cannot write x: No space left"
    log.write_text(
        log.read_text() + "fedcover: round 2: client 3 rejected: its node says: 'fedcover: stopped: a lie'\n"
    )
    assert said(log) == "cannot write x: No space left"
    log.write_text("Traceback: oh\n")
    assert "Traceback: oh" in said(log)


class Played:
    """A process that takes its next step whenever somebody asks whether it has ended, and ends after the last."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def poll(self):
        if not self.steps:
            return 0
        self.steps.pop(0)()
        return None


def test_rounds_that_are_run_again_are_shown_again(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    metrics, log = tmp_path / "metrics.jsonl", tmp_path / "log.txt"

    def done(*rounds):
        return lambda: metrics.write_text("".join(json.dumps({"round": round}) + "\n" for round in rounds))

    log.write_text("")
    done(*range(9))()
    finish = partial((tmp_path / "summary.json").write_text, "{}")
    seen = []
    cut_and_run_again = [done(*range(5)), done(*range(6)), done(*range(8)), done(*range(9)), done(*range(10))]
    follow(Played(lambda: None, *cut_and_run_again, finish), tmp_path, log, lambda report: seen.append(report.round))
    assert seen == [5, 6, 7, 8, 9]


def test_a_server_that_has_gone_without_a_word_is_missed(tmp_path, monkeypatch):
    """Not before it has come, not while it ends, and not if it has said why."""
    log, clock = tmp_path / "log.txt", iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    log.write_text("")

    def watched(*there):
        seen = iter(there)
        steps = [lambda: None] * len(there)
        follow(Played(*steps), tmp_path, log, lambda report: None, lambda: next(seen))

    for honest in ([False] * 5, [True] * 5, [False, True, False]):
        with pytest.raises(RunError, match="did not finish"):
            watched(*honest)
    with pytest.raises(RunError, match="the server's process has ended without a word"):
        watched(True, False, False, False)
    log.write_text("fedcover: stopped: no room\n")
    with pytest.raises(RunError, match="no room"):
        watched(True, False, False, False)


def test_only_the_server_says_that_a_run_has_finished(capfd):
    def streamed(text):
        return pass_on([sys.executable, "-c", f"print({text!r})"], dict(os.environ))

    streamed("hello\nfedcover: finished: runs/x")
    with pytest.raises(RunError, match="its log is above"):
        streamed("fedcover: round 1: client 3 rejected: its node says: 'fedcover: finished: runs/x'")
    with pytest.raises(RunError, match=r"^no room$"):
        streamed("fedcover: stopped: no room\nTraceback")
    shown = capfd.readouterr().out
    assert "hello" in shown
    assert "Traceback" not in shown  # what Flower makes of a sentence that is said already


def test_what_streams_a_log_ends_with_whoever_reads_it():
    """A kill while the log is passed on must not leave the streaming process behind."""
    script = "import time; print('begun', flush=True); time.sleep(60)"
    reader = f"""
import signal, sys
from fedcover.flower.following import pass_on
def stop(number, frame): raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
try: pass_on([sys.executable, "-c", {script!r}], {{}})
except KeyboardInterrupt: sys.exit(130)
"""
    with subprocess.Popen([sys.executable, "-c", reader], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        family = descendants([process.pid])
        process.terminate()
        assert process.wait(30) == 130
    assert family
    assert not family & descendants([os.getpid()])


def test_functions_beside_the_file_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(commands, "require", lambda: None)  # these refusals need no Flower
    (tmp_path / "beside_flower.py").write_text("def alternating(view):\n    return {}\n")
    (tmp_path / "own.toml").write_text('policy = "beside_flower:alternating"\nclients = 4\nactive = 2\n')
    with pytest.raises(InvalidValue, match="nodes must be in"):
        commands.up(tmp_path / "own.toml", nodes=99)
    with pytest.raises(InvalidValue, match="nodes must be in"):
        commands.run(tmp_path / "own.toml", nodes=99)


def test_what_cannot_go_well_is_refused_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "require", lambda: None)
    monkeypatch.setattr(commands, "local", lambda *given: pytest.fail("a federation is started"))
    wanted = Experiment(clients=4, active=2, rounds=1, epochs=1)
    (tmp_path / "own.toml").write_text(wanted.to_toml())
    with pytest.raises(InvalidValue, match="device must be one of auto, cpu, cuda, cuda:1; got 'gpu'"):
        commands.run(tmp_path / "own.toml", device="gpu")
    run(wanted, tmp_path / "run", machine=Machine("flower", "cpu"), engine=ENGINES["sequential"])
    with Folder(tmp_path / "run").opened(), pytest.raises(RunError, match="run is in use by another process"):
        commands.up(tmp_path / "run")


def test_a_round_tells_of_those_who_did_not_answer(capsys):
    line = {"gamma_round": 0, "gamma_window": 0, "seconds": {}, "rejected": 3, "late": 0, "lost": 2}
    with console.watching("mine", 2) as watch:
        watch(Report(0, line))
    assert "coverage 0 (window 0)  3 rejected  2 lost" in capsys.readouterr().err
    assert unanswered([line, {**line, "late": 1}]) == {"rejected": 6, "late": 1, "lost": 4}
    assert unanswered([{}]) == {}


def test_what_was_started_is_found_without_other_programs(monkeypatch):
    """Small containers have no `ps`, and what is not found is not stopped."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as parent:
        monkeypatch.setenv("PATH", "")
        while not (found := descendants([parent.pid])):
            time.sleep(0.05)
        assert parent.pid not in found
        assert found < descendants([os.getpid()])
        parent.communicate(b"\n")
    assert not found & descendants([os.getpid()])


def test_a_long_lived_program_lets_no_garbage_lie():
    """What hangs in a cycle is gone soon, although Python itself would not look for it."""
    node = """
import gc, sys, time, types, weakref
from fedcover.flower import steady
class Held:
    pass
def node():
    held = Held()
    held.itself = held
    left = weakref.ref(held)
    del held
    while left() is not None:
        time.sleep(0.01)
gc.disable()
steady.PAUSE = 0.01
made_up = types.ModuleType("made_up")
made_up.node = node
sys.modules["made_up"] = made_up
steady.PROGRAMS["flower-supernode"] = "made_up:node"
sys.argv = ["steady", "flower-supernode"]
steady.main()
"""
    subprocess.run([sys.executable, "-c", node], check=True, timeout=120)


def test_without_flower_its_programs_cannot_be_run():
    hidden = "import sys; sys.modules['flwr'] = None; from fedcover.flower import steady; steady.main()"
    done = subprocess.run(
        [sys.executable, "-c", hidden, "flower-superlink"], capture_output=True, text=True, check=False
    )
    told = "fedcover: this needs Flower; in a checkout of fedcover: pip install '.[flower]'\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_only_programs_of_flower_are_run_so():
    done = subprocess.run(
        [sys.executable, "-m", "fedcover.flower.steady", "ls"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    told, usage = done.stderr.splitlines()
    assert told == "fedcover: program must be one of flower-superlink, flower-supernode; got 'ls'"
    asked = [sys.executable, "-m", "fedcover.flower.steady", "--help"]
    assert subprocess.check_output(asked, text=True).splitlines() == [usage]


def without_and_with(call, script, environment=None):
    """What a script prints without a call, and with it."""
    return [
        subprocess.check_output(
            [sys.executable, "-c", script.replace("CALL", said)], timeout=120, env=environment, text=True
        )
        for said in ("", call)
    ]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives every thread its heap")
def test_one_heap_for_all_threads():
    """Threads that need memory at the same time take it from the same heap."""
    heaps = """
import ctypes, os, threading
from fedcover.flower.memory import one_heap
library = ctypes.CDLL(None)
library.fdopen.restype = ctypes.c_void_p
library.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
library.fflush.argtypes = [ctypes.c_void_p]
CALL
together = threading.Barrier(4)
def need():
    held = [bytes(2000) for _ in range(100)]
    together.wait()
threads = [threading.Thread(target=need) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
reading, writing = os.pipe()
file = library.fdopen(writing, b"w")
library.malloc_info(0, file)
library.fflush(file)
print(os.read(reading, 65536).count(b"<heap nr="))
"""
    alone, called = map(int, without_and_with("one_heap()", heaps))
    assert called == 1 < alone


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc raises its limit by itself")
def test_large_pieces_stay_out_of_the_heap():
    """However large a piece has been freed before, the next large one has pages of its own."""
    apart = """
import ctypes
from fedcover.flower.memory import LARGE, one_heap
CALL
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c apart d e used free f".split()]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
bytes(2**22)
before = library.mallinfo2().apart
held = bytes(2**21)
print(library.mallinfo2().apart - before > LARGE)
"""
    assert without_and_with("one_heap()", apart) == ["False\n", "True\n"]


def test_names_that_were_looked_up_are_not_kept():
    """Python's cache of attributes keeps a name that was made for one lookup until another one takes its place."""
    names = """
import sys
from fedcover.flower.memory import tidy
tidy()
before = sys.getallocatedblocks()
names = ["name" + str(number) for number in range(4000)]
found = [hasattr(tidy, name) for name in names]
del names, found
CALL
print(sys.getallocatedblocks() - before)
"""
    alone, tidied = map(int, without_and_with("tidy()", names))
    assert tidied < 100 < 300 < alone


@pytest.mark.skipif(sys.platform != "linux", reason="sizes are read from /proc")
def test_a_peak_within_the_reserve_takes_no_pages():
    """Whatever sizes its pieces have, in whatever order they come and go, a peak has Python ask for no more."""
    peaks = """
import contextlib, random, re
from pathlib import Path
from fedcover.flower.memory import RESERVE, reserve
def kib(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
some = random.Random(0)
with contextlib.ExitStack() as stack:
    CALL
    asked, used = kib("VmData"), kib("RssAnon")
    for _ in range(3):
        peak = [bytes(some.randrange(100, 450)) for _ in range(RESERVE // 700)]
        some.shuffle(peak)
        del peak[::2], peak
    print(kib("VmData") - asked, kib("RssAnon") - used)
"""
    alone, kept = ([int(word) for word in told.split()] for told in without_and_with(
        "stack.enter_context(reserve())", peaks))  # fmt: skip
    assert kept[0] < 1000 < alone[0]  # Python asks by the megabyte, the list itself by a tenth of that
    assert kept[1] < 300 < alone[1]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives every thread a cache")
@pytest.mark.parametrize("given", [None, "glibc.malloc.check=0"])
def test_freed_memory_is_in_no_threads_cache(given):
    """What has been freed counts as free at once, in this program only, and the user's own settings stay."""
    freed = """
import ctypes, os
from fedcover.flower.memory import TUNABLES, no_caches
CALL
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c d e f used free g".split()]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
for piece in [library.malloc(1000) for _ in range(7)]:
    library.free(piece)
before = library.mallinfo2().used
pieces = [library.malloc(1000) for _ in range(7)]
print(library.mallinfo2().used - before > 6000, os.environ.get(TUNABLES, ""))
"""
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    if given:
        environment["GLIBC_TUNABLES"] = given
    assert without_and_with("no_caches()", freed, environment) == [f"False {given or ''}\n", f"True {given or ''}\n"]
    inherited = ":".join([*([given] if given else []), NO_CACHES])
    assert without_and_with("no_caches(inherited=True)", freed, environment)[1] == f"True {inherited}\n"
