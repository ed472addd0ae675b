"""The Flower run equals the run in one process bit for bit: the checkpoints are the same files."""

import pytest

from tests.system.harness import checkpoints, experiment, reference, submit

WORLDS = {
    "sliced": {"policy": "rolling(spread=true)"},
    "masked": {"policy": "magnitude"},
    "drawn, tracked statistics": {
        "policy": "random", "norm": "tracked", "model": "wide_resnet(depth=10, widen=1)", "clients": 4, "active": 4,
        "dataset": "synthetic(shape=(3, 8, 8), classes=3, samples=12, test_size=50)", "calibration": 40,
    },
    "private masks": {"policy": "full", "recipe": "hermes(good_enough=0.0)"},
    "measured by clients": {"policy": "prunefl", "recipe": "prunefl", "fleet": "1x0.5"},
}  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_three_rounds_are_the_same_bits(pair, tmp_path, world):
    wanted = experiment(**WORLDS[world])
    before = messages(pair)
    run = submit(pair, wanted, tmp_path / "run", nodes=2).finish()
    lines = run.rounds(3)
    assert [now - then for now, then in zip(messages(pair), before, strict=True)] == [3, 3]  # one a node and round
    assert [(line["rejected"], line["late"], line["lost"]) for line in lines] == [(0, 0, 0)] * 3
    expected = reference(wanted, tmp_path / "here")
    if world == "private masks":  # which stay on the nodes, so a checkpoint here has more in it
        same_but_private(tmp_path / "run", tmp_path / "here")
    else:
        assert checkpoints(tmp_path / "run") == expected


def messages(federation):
    """How many messages with work each SuperNode has received so far."""
    logs = [federation.log(f"supernode-{place}").read_text() for place in range(2)]
    return [log.count("Receiving: train message") for log in logs]


def same_but_private(there, here):
    from safetensors.torch import load_file

    for left, right in zip(checkpoints(there), checkpoints(here), strict=True):
        found = load_file(there / "checkpoints" / left)
        known = load_file(here / "checkpoints" / right)
        assert any(name.startswith("private/") for name in known)
        assert found.keys() == {name for name in known if not name.startswith("private/")}
        assert all(tensor.equal(known[name]) for name, tensor in found.items())
