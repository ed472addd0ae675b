"""Faults of nodes with real processes: they die, come back, or are slow."""

from fedcover.flower.local_federation import run_local_federation
from tests.system.harness import children, experiment, fair_deadline, submit, wait_for


def test_killed_node_comes_back(tmp_path):
    """The round ends by our deadline; with tolerate=1 nothing goes uncovered; a new node takes the
    old one's place.
    """
    settings = experiment(
        clients=3,
        active=3,
        fleet="1x0.75",
        policy="planned(tolerate=1)",
        model="mlp(hidden=[16])",
        rounds=5,
        epochs=2,
    )
    configs = [{"partition-id": place, "num-partitions": 3} for place in range(3)]
    with run_local_federation(tmp_path / "flower", configs) as federation:
        deadline = fair_deadline(federation, tmp_path / "before")
        run = submit(federation, settings, tmp_path / "run", nodes=3, deadline=deadline)
        run.rounds(1)
        wait_for(
            lambda: children(federation, "supernode-1", "flwr-clientapp"),
            "the node works on a round",
        )
        federation.kill("supernode-1")
        hit = len(run.lines())
        run.rounds(hit + 1)
        federation.start_supernode("supernode-back", {})  # it gets the place that is free
        lines = run.finish().rounds(5)
    assert lines[hit]["late"] + lines[hit]["lost"] == 1
    assert lines[hit]["dropped"] == [1]
    (event,) = [e for e in run.lines("events.jsonl") if e["round"] == hit and e["client"] == 1]
    assert event["event"] == "lost" or event["why"] == f"no answer in {deadline:g} s"
    assert all(line["gamma_round"] >= 1 for line in lines)
    back = [line for line in lines[hit + 1 :] if not line["dropped"]]
    assert back, "the node that came back was never asked"
    answered = {line["node"] for line in run.events("answered") if line["client"] == 1}
    assert len(answered) == 2  # to Flower it is another node


def test_stragglers_do_not_delay_a_round(tmp_path, monkeypatch):
    """Who has not answered by the deadline is left out; the others count."""
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom fedcover.training.recipes.fedprox import plain\n\n\n"
        "def recipe():\n    time.sleep(float(os.environ.get('SLOW', '0')))\n    return plain()\n"
    )
    settings = experiment(recipe="plain", rounds=2, policy="prefix", active=8)
    monkeypatch.syspath_prepend(tmp_path)
    settings = settings.model_copy(update={"recipe": "slow:recipe"})
    with run_local_federation(
        tmp_path / "flower", [{"partition-id": 0, "num-partitions": 2}], [str(tmp_path)]
    ) as federation:
        deadline = fair_deadline(federation, tmp_path / "before")
        monkeypatch.setenv("SLOW", "1000")
        federation.start_supernode("supernode-slow", {"partition-id": 1, "num-partitions": 2})
        run = submit(federation, settings, tmp_path / "run", nodes=2, deadline=deadline).finish()
    lines = run.rounds(2)
    assert [(line["late"], sorted(line["dropped"])) for line in lines] == [(4, [4, 5, 6, 7])] * 2
    assert all(sorted(map(int, line["clients"])) == [0, 1, 2, 3] for line in lines)


def test_refused_node_logs_why(tmp_path):
    """In its own log, whose reader may not see the server's: what it knows itself, and what the
    server objects to.
    """
    configs = [
        {"partition-id": 0, "num-partitions": 1},
        {"partition-id": 0, "num-partitions": 2},
        {"partition-id": 0, "num-partitions": 1, "capacity": 7.0},
    ]
    with run_local_federation(tmp_path / "flower", configs) as federation:
        submit(federation, experiment(rounds=100), tmp_path / "run", nodes=1)
        reason_at_server = (
            "the server does not accept this node: num-partitions must be 1, as elsewhere; got 2"
        )
        assert wait_for(
            lambda: reason_at_server in federation.log("supernode-1").read_text(),
            "the server's objection",
        )
        reason = "this node cannot take part: capacity in --node-config must be in (0, 1]; got 7.0"
        assert wait_for(
            lambda: reason in federation.log("supernode-2").read_text(), "what is wrong by itself"
        )
