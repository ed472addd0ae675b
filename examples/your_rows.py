"""Run on Flower with rows that stay on their devices: one file for the server, one per node.

Run it from the root of the repository, with Flower installed: python -m examples.your_rows
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from examples.your_data import rings

EXPERIMENT = """
dataset = "server.safetensors"     # what the server tests on, and some rows for norm statistics
partition = "nodes"                # the clients' rows are where they are
model = "mlp(hidden=[48])"
clients = 20
active = 20
policy = "rolling"
fleet = "1x1.0 + 1x0.5"
rounds = 6
lr = 0.05
"""


def write(folder: Path) -> None:
    """The first ten owners' rows for one node, the others' for another, from one data set."""
    data = rings()
    owners = data.owner
    assert owners is not None
    some = {
        "train_x": data.train.x[:50],
        "train_y": data.train.y[:50],
        "test_x": data.test.x,
        "test_y": data.test.y,
    }
    save_file(
        {name: rows.contiguous() for name, rows in some.items()}, folder / "server.safetensors"
    )
    for place in range(2):
        is_local = owners // 10 == place
        rows = {
            "train_x": data.train.x[is_local],
            "train_y": data.train.y[is_local],
            "train_owner": owners[is_local],
        }
        save_file(rows, folder / f"node-{place}.safetensors")  # or np.savez
    (folder / "experiment.toml").write_text(EXPERIMENT)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        write(Path(place))
        # on machines of their own each node has its file's path in --node-config (docs/deploy.md)
        up = [
            sys.executable,
            "-m",
            "fedcover",
            "flower",
            "up",
            "--nodes",
            "2",
            "--rows",
            "node-{}.safetensors",
        ]
        process = subprocess.run(
            [*up, "--json", "experiment.toml"], cwd=place, stdout=subprocess.PIPE, check=True
        )
        print(f"accuracy {json.loads(process.stdout)['accuracy']:.3f}")
