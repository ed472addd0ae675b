"""Commands about data sets: data get, data check."""

import sys

from cyclopts import App

from fedcover.cli import console
from fedcover.cli.options import Data, Json, app
from fedcover.data import datasets

data_app = App(name="data", help="Download or check data sets.")
app.command(data_app)


@data_app.command
def get(name: str, *, data: Data = None) -> None:
    """Download a data set from its publisher, unless it is present, and check it."""
    folder = datasets.data_folder(data)
    datasets.get(name, folder)
    print(f"{name} is complete in {folder}")


@data_app.command
def check(name: str, *, data: Data = None, json: Json = False) -> None:
    """Compare the files of a data set with their published digests."""
    results = datasets.check(name, datasets.data_folder(data))
    num_wrong = sum(not result.ok for result in results)
    if json:
        files = [
            {
                "path": str(result.path),
                "ok": result.ok,
                "got": result.actual,
                "expected": result.expected,
            }
            for result in results
        ]
        console.show_json(files)
    else:
        rows = []
        for result in results:
            status = "ok" if result.ok else "WRONG"
            rows.append([str(result.path), status, result.actual or "missing", result.expected])
        console.table(name, ["file", "", "digest", "expected"], rows)
        if num_wrong:
            print(f"{num_wrong} of {len(results)} files are missing or wrong")
        else:
            print(f"all files of {name} match their published digests")
    if num_wrong:
        sys.exit(1)
