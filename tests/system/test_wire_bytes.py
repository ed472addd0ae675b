"""Bytes at the socket, on real processes: what a client moves follows its capacity."""

import runpy

from tests.helpers.repository import ROOT

WIRE = ROOT / "benchmarks" / "flower_wire.py"


def test_quarter_width_moves_under_eight_percent_of_the_bytes(tmp_path):
    """Tasks and answers in both directions; a little more is counted here than in the benchmark:
    all rounds.
    """
    wire = runpy.run_path(str(WIRE))
    counted = wire["measure"](tmp_path, rounds=2)["all_bytes_by_path"]
    full, quarter = (sum(paths.get(path, 0) for path in wire["CARRYING"]) for paths in counted)
    assert full > 2 * 2 * 4 * 1_400_000  # two rounds, both ways, four bytes for each parameter
    assert quarter < 0.08 * full
