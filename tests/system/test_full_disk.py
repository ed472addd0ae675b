"""A disk at the server that is really full: in a file of its own, as files are what processes share
the tests by.
"""

import re

import fedcover as fc
from fedcover.flower.local_federation import run_local_federation
from fedcover.runs.metrics_log import read_lines
from tests.helpers.disks import PAGE, fill, small_disk
from tests.system.harness import checkpoints, experiment, submit, wait_for


def test_full_disk_at_the_server(tmp_path):
    """It fills up twice, within a line and within a checkpoint; each time the run stops, and goes
    on with room.
    """
    settings = experiment(
        policy="prefix", model="mlp(hidden=[64])", clients=40, active=40, rounds=4
    )
    right = every_checkpoint(settings, tmp_path / "here")
    configs = [{"partition-id": place, "num-partitions": 2} for place in range(2)]
    with (
        small_disk(tmp_path / "disk", 2**20) as disk,
        run_local_federation(home_on(disk, tmp_path / "flower"), configs) as federation,
    ):
        folder = disk / "run"
        for rounds_done, spare, torn in (
            (1, 0, r"events\.jsonl"),
            (2, 8 * PAGE, r"checkpoints/round-\S+"),
        ):
            run = submit(federation, settings, folder, nodes=2, resume=rounds_done > 1)
            run.rounds(rounds_done)
            wait_for(
                lambda newest=right[rounds_done - 1]: newest in checkpoints(folder), "a checkpoint"
            )
            filler = fill(disk, spare)
            output = run.finish().text
            full = (
                rf"stopped: cannot write {folder}/{torn}: No space left on device; "
                rf"the checkpoint of round (\d) is"
            )
            last = int(re.search(full, output)[1])
            assert f"mend that, then 'fedcover flower up --nodes N {folder}'" in output
            assert checkpoints(folder) == right[:last][-2:]  # and nothing else is beside them
            assert fc.load(folder).state.round == last
            filler.unlink()
        again = submit(federation, settings, folder, nodes=2, resume=True).finish()
        assert [line["round"] for line in again.rounds(4)] == [0, 1, 2, 3]
        assert checkpoints(folder) == right[-2:]
        events = read_lines(folder / "events.jsonl")
        of_clients = {
            (event["round"], event["client"]) for event in events if event["client"] is not None
        }
        assert of_clients == {(round, client) for round in range(4) for client in range(40)}


def every_checkpoint(wanted, folder):
    """The names of all checkpoints that an undisturbed run writes, old ones that it removes
    included.
    """
    files = set()
    fc.run(
        wanted,
        folder,
        machine=fc.Machine("sequential", "cpu"),
        watch=lambda _: files.update(checkpoints(folder)),
    )
    return sorted(files)


def home_on(disk, place):
    """A folder for a federation whose SuperLink has its home on a disk."""
    (disk / "superlink").mkdir()
    place.mkdir()
    (place / "superlink").symlink_to(disk / "superlink")
    return place
