"""A round in two processes equals a round in one, for every policy, recipe, rule and norm."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import FileStore

from fedcover.models.norms import NORMS, statistics_key
from fedcover.runs.launch import join_process_group
from fedcover.runs.machine import num_useful_processes, physical_cores
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.collectives import ProcessGroup, shard_by_cost
from fedcover.server.optimizers import SERVERS
from fedcover.server.sharded_round import training_cost
from fedcover.training.recipes import RECIPES
from fedcover.types import Assignment
from tests.helpers.repository import ROOT
from tests.helpers.second_process import setup_of, share_rounds, tensors_of, two_rounds
from tests.helpers.tables import EVERY_POLICY, EVERY_RECIPE, EVERY_RULE, model_for
from tests.helpers.worlds import same, world


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """Two processes that share rounds: this one, and one that is started here."""
    folder = tmp_path_factory.mktemp("meeting")
    command = [sys.executable, "-m", "tests.helpers.second_process", str(folder)]
    other = subprocess.Popen(command, cwd=ROOT)
    with join_process_group(0, 2, FileStore(f"{folder}/store", 2)) as ranks:
        yield ranks
        ranks.broadcast("no more")
    assert other.wait(timeout=60) == 0


def agree(process_group, model="mlp", engine="sequential", **fields):
    process_group.broadcast("go on")
    rounds, digests = share_rounds(process_group, (model, engine, fields))
    assert digests[0] == digests[1]
    expected = two_rounds(*setup_of(model, engine, fields))
    for (state, report), (expected_state, expected_report) in zip(rounds, expected, strict=True):
        same(tensors_of(state), tensors_of(expected_state), 1e-12)
        left, right = report.metrics, expected_report.metrics
        assert left.keys() == right.keys()
        for name in left.keys() - {"seconds", "clients"}:
            assert left[name] == (
                pytest.approx(right[name], rel=1e-10)
                if isinstance(right[name], float)
                else right[name]
            )
        assert left["clients"].keys() == right["clients"].keys()
        for client, about in right["clients"].items():
            assert left["clients"][client] == pytest.approx(about, rel=1e-10)
    return rounds[-1][0]


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_sharded_round_of_every_policy(process_group, name):
    fields = {"fleet": "3x1.0 + 3x0.5", "assignment": "slot", **EVERY_POLICY[name]}
    agree(process_group, **fields)


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_sharded_round_of_every_recipe(process_group, name):
    state = agree(process_group, model_for(name), epochs=1, **EVERY_RECIPE[name])
    recipe = RECIPES[name]()
    assert bool(state.private) == recipe.chooses
    assert bool(state.measured) == bool(recipe.measures)


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_sharded_round_of_every_rule(process_group, rule):
    agree(process_group, policy="random", rule=rule, weights="samples")


@pytest.mark.parametrize("norm", NORMS)
def test_sharded_round_of_norm_statistics(process_group, norm):
    state = agree(
        process_group, "wide_resnet", policy="prefix", norm=norm, epochs=1, clients=6, active=3
    )
    assert bool(state.statistics) == (statistics_key(norm, 1.0) is not None)


@pytest.mark.parametrize("server", SERVERS)
def test_sharded_round_of_every_server(process_group, server):
    agree(process_group, policy="rolling", server=server)


@pytest.mark.parametrize(
    "fields",
    [
        {"uncovered": "zero", "server": "momentum"},
        {"drop_out": 0.5},
        {"drop_out": 0.999},
        {"active": 1},
        {"rounds": 2, "local_every": 1},
        {"evaluation": "batch-compat"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_sharded_round_of_every_switch(process_group, fields):
    agree(process_group, policy="rolling", **fields)


@pytest.mark.parametrize("policy", ["prefix", "magnitude"])
def test_sharded_round_of_the_batched_engine(process_group, policy):
    agree(process_group, engine="batched", policy=policy)


class TestShares:
    """Who trains which clients."""

    @given(costs=st.lists(st.integers(1, 1000), max_size=30), num_processes=st.integers(1, 8))
    def test_shards_hold_every_client_once_and_balance_costs(self, costs, num_processes):
        shares = shard_by_cost(costs, num_processes)
        assert sorted(place for places in shares for place in places) == list(range(len(costs)))
        loads = [sum(costs[place] for place in places) for places in shares]
        assert max(loads) <= sum(costs) / num_processes + max(costs, default=0)

    def test_shards_of_equal_clients_are_even(self):
        assert [len(places) for places in shard_by_cost([3.0] * 10, 4)] == [3, 3, 2, 2]

    def test_client_cost_falls_with_width_but_not_with_masks(self):
        for policy, cheaper in (("prefix", True), ("magnitude", False)):
            setup, state = world("mlp", policy=policy)
            cohort = cohort_of(setup, 0)
            parts = setup.policy(view_of(setup, state, cohort))
            prices = {
                client.capacity: training_cost(
                    Assignment(setup.task, state, client, part), setup.uses
                )
                for client, part in zip(cohort, parts, strict=True)
            }
            assert (prices[0.25] < prices[0.5] < prices[1.0]) == cheaper

    @given(number=st.integers(0, 100), size=st.integers(1, 8))
    def test_local_slices_cover_all_rows_once(self, number, size):
        shares = [
            list(range(number))[ProcessGroup(rank, size).local_slice(number)]
            for rank in range(size)
        ]
        assert [row for local_slice in shares for row in local_slice] == list(range(number))

    def test_processes_are_used_only_where_they_pay(self):
        assert num_useful_processes(3600, clients=10, cores=2) == 2
        assert num_useful_processes(3600, clients=10, cores=1) == 1
        assert num_useful_processes(3600, clients=1, cores=2) == 1
        assert num_useful_processes(1, clients=10, cores=2) == 1

    @pytest.mark.parametrize(
        ("allowed", "quota", "cores"),
        [
            ({0, 1, 2, 3}, "max 100000", 2),  # hyper-threads count once
            ({0, 1}, "max 100000", 1),
            ({0, 2}, "", 2),
            ({0, 1, 2, 3}, "150000 100000", 1),  # a container's limit
            ({0, 1, 2, 3}, "50000 100000", 1),
            ({0, 1, 2, 3}, "800000 100000", 2),
        ],
    )
    def test_physical_cores_are_those_allowed(self, monkeypatch, allowed, quota, cores):
        siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        files = {siblings.format(n): f"{n // 2 * 2}-{n // 2 * 2 + 1}" for n in range(4)}
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: allowed, raising=False)
        all_files = {**files, "/sys/fs/cgroup/cpu.max": quota}
        monkeypatch.setattr("fedcover.runs.machine._read", all_files.__getitem__)
        assert physical_cores() == cores
