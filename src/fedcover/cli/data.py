"""Commands about data sets: data get, data check."""

import sys

from cyclopts import App

from fedcover.cli import console
from fedcover.cli.options import Data, Json, app
from fedcover.data import datasets

data_app = App(name="data", help="Get or check the data sets.")
app.command(data_app)


@data_app.command
def get(name: str, *, data: Data = None) -> None:
    """Download a data set from its publisher, unless it is there, and check it."""
    folder = datasets.data_folder(data)
    datasets.get(name, folder)
    print(f"{name} is complete in {folder}")


@data_app.command
def check(name: str, *, data: Data = None, json: Json = False) -> None:
    """Compare a data set's files with their publisher's digests."""
    results = datasets.check(name, datasets.data_folder(data))
    if json:
        console.show_json(
            [
                {"path": str(r.path), "ok": r.ok, "got": r.actual, "expected": r.expected}
                for r in results
            ]
        )
    else:
        rows = [
            [str(r.path), "ok" if r.ok else "WRONG", r.actual or "missing", r.expected]
            for r in results
        ]
        console.table(name, ["file", "", "digest", "expected"], rows)
        wrong = sum(not result.ok for result in results)
        print(
            f"{wrong} of {len(results)} files are missing or wrong"
            if wrong
            else f"{name} is as it was published"
        )
    if not all(result.ok for result in results):
        sys.exit(1)
