"""A compromised node cannot touch the global model: every wrong answer is rejected by name, and the
rounds go on.
"""

import re
import shutil
import time
from pathlib import Path

from fedcover.flower.local_federation import run_local_federation
from fedcover.training.engines.sequential import sequential
from tests.system.compromised import EACH, HUGE, ROUNDS, WHY
from tests.system.harness import (
    checkpoints,
    children,
    experiment,
    fair_deadline,
    reference,
    submit,
    wait_for,
)


def test_compromised_node_is_rejected_answer_by_answer(tmp_path, monkeypatch):
    """One honest answer among twelve wrong ones counts; of messages that are wrong as a whole none
    does.
    """
    nodes, here = 2, len(EACH)
    settings = experiment(
        policy="rolling", clients=nodes * here, active=nodes * here, rounds=len(ROUNDS)
    )
    evil = tmp_path / "evil"
    evil.mkdir()
    shutil.copy(Path(__file__).parent / "compromised.py", evil / "sitecustomize.py")
    with run_local_federation(
        tmp_path / "flower", [{"partition-id": 0, "num-partitions": nodes}]
    ) as federation:
        monkeypatch.setenv("COMPROMISED", str(tmp_path / "memory"))
        federation.python_path = [str(evil)]
        federation.start_supernode("supernode-evil", {"partition-id": 1, "num-partitions": nodes})
        run = submit(federation, settings, tmp_path / "run", nodes=nodes, deadline=600.0)
        (server,) = wait_for(
            lambda: children(federation, "superlink", "flwr-serverapp"), "the server"
        )
        peak = 0
        while run.process.poll() is None:
            peak = max(peak, high_water(server))
            time.sleep(0.2)
        lines = run.finish().rounds(len(ROUNDS))
    assert [line["rejected"] for line in lines] == [0, here - 1, here, here, here]  # of clients
    events = {(line["round"], line["client"]): line["why"] for line in run.events("rejected")}
    for client, kind in enumerate(EACH[:-1], here):
        assert WHY[kind] in events[1, client]
    assert "not asked for" in events[1, None]
    assert (1, 2 * here - 1) not in events
    for round, kind in enumerate(ROUNDS[2:], 2):
        assert all(WHY[kind] in events[round, client] for client in range(here, 2 * here)), (
            kind,
            events,
        )
    for why in WHY.values():
        assert why in run.text  # for whoever looks at the log
    assert (
        peak < HUGE + 300_000_000
    )  # the reply was never taken in beside what a server needs anyway

    def only_honest(task, state, work, lr):
        honest = {0: range(2 * here), 1: [*range(here), 2 * here - 1]}.get(state.round, range(here))
        return sequential(task, state, [(c, r) for c, r in work if c.id in honest], lr)

    assert checkpoints(tmp_path / "run") == reference(settings, tmp_path / "here", only_honest)


def high_water(pid: int) -> int:
    """The most memory that a process has used, in bytes."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    peaks = [line.split()[1] for line in text.splitlines() if line.startswith("VmHWM")]
    return int(peaks[0]) * 1024 if peaks else 0


def test_hostile_node_does_not_delay_the_others(tmp_path):
    """Before the honest node is done, it sends half a reply, an endless list of pieces, or no
    tensors at all.
    """
    from tests.system.handmade import HandMade, all_report, half_sent, long_list

    settings = experiment(policy="rolling", clients=4, active=4, rounds=3)
    with run_local_federation(
        tmp_path / "flower", [{"partition-id": 0, "num-partitions": 2}]
    ) as federation:
        deadline = fair_deadline(federation, tmp_path / "before")
        attacks = [half_sent, long_list, all_report]
        evil = HandMade(federation.address, {"partition-id": 1, "num-partitions": 2}, attacks)
        evil.start()
        try:
            run = submit(
                federation, settings, tmp_path / "run", nodes=2, deadline=deadline
            ).finish()
        finally:
            evil.stop()
    lines = run.rounds(3)
    assert [sorted(map(int, line["clients"])) for line in lines] == [[0, 1]] * 3, run.lines(
        "events.jsonl"
    )
    assert [(line["late"], line["rejected"]) for line in lines] == [(2, 0), (0, 2), (0, 2)]
    reasons = [
        {
            event["why"]
            for event in run.lines("events.jsonl")
            if event["client"] == 2 and event["round"] == n
        }
        for n in range(3)
    ]
    half = (
        "a part of its reply has arrived|did "
        "not arrive as a whole"
    )  # by whether Flower has forgotten it meanwhile
    for whys, words in zip(reasons, (half, "too large", "not tensors"), strict=True):
        assert all(re.search(words, why) for why in whys), reasons
