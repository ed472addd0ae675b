"""The Flower run equals the run in one process bit for bit: the checkpoints are the same files."""

import pytest

from tests.system.harness import (
    WORLDS,
    checkpoints,
    experiment,
    reference,
    same_but_private,
    submit,
)


@pytest.mark.parametrize("world", WORLDS)
def test_flower_run_equals_one_process_bit_for_bit(pair, tmp_path, world):
    settings = experiment(**WORLDS[world])
    before = messages(pair)
    run = submit(pair, settings, tmp_path / "run", nodes=2).finish()
    lines = run.rounds(3)
    assert [now - then for now, then in zip(messages(pair), before, strict=True)] == [
        3,
        3,
    ]  # one a node and round
    assert [(line["rejected"], line["late"], line["lost"]) for line in lines] == [(0, 0, 0)] * 3
    expected = reference(settings, tmp_path / "here")
    if world == "private masks":  # which stay on the nodes, so a checkpoint here has more in it
        same_but_private(tmp_path / "run", tmp_path / "here")
    else:
        assert checkpoints(tmp_path / "run") == expected


def messages(federation):
    """How many messages with work each SuperNode has received so far."""
    logs = [federation.log(f"supernode-{place}").read_text() for place in range(2)]
    return [log.count("Receiving: train message") for log in logs]
