"""Run all architectures, one process for each; a run that was stopped goes on where it was (`make
architectures`).
"""

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.architectures.borrowed import import_timm
from benchmarks.architectures.families import Architecture, architectures
from benchmarks.architectures.page import DOCUMENT, written
from benchmarks.architectures.trial import attempt

RESULTS = Path(__file__).parent.parent / "results" / "architectures.jsonl"
LIMIT = 200.0
"""Seconds that one architecture may take."""


def rows_in(file: Path) -> list[dict[str, Any]]:
    """What is known by now."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _tell(pipe: Connection, architecture: Architecture) -> None:
    torch.set_num_threads(1)
    pipe.send(attempt(architecture))


def tried(architecture: Architecture, limit: float) -> dict[str, Any]:
    """Try one architecture in a process of its own, which ends when it takes too long."""
    context = multiprocessing.get_context("fork")
    receiver, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(theirs, architecture))
    process.start()
    theirs.close()
    try:
        if receiver.poll(limit):
            return receiver.recv()
        return {"outcome": "late", "reason": f"took longer than {limit:g} s"}
    except EOFError:
        process.join()
        return {"outcome": "broken", "reason": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def run(file: Path, only: Sequence[str], limit: float) -> None:
    """Try what is not in the file yet and add it line by line."""
    import_timm()  # once, for all the processes that are forked
    finished_families = {(row["library"], row["family"]) for row in rows_in(file)}
    todo = [
        each for each in architectures() if (each.library, each.family) not in finished_families
    ]
    todo = [each for each in todo if not only or each.family in only]
    for number, each in enumerate(todo, 1):
        row = {
            "library": each.library,
            "family": each.family,
            "model": each.model,
            "options": dict(each.options),
        }
        row |= {
            "date": datetime.now(UTC).date().isoformat(),
            **versions(each.library),
            **tried(each, limit),
        }
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(
            f"{number}/{len(todo)} {each.family}: {row['outcome']} {row.get('reason', '')}"[:200],
            flush=True,
        )


def versions(library: str) -> dict[str, str]:
    """With what a row was made."""
    import fedcover

    package_versions = (
        {} if library == "torchvision" else {library: version(library)}
    )  # written by hand, as torchvision writes them
    return {"fedcover": fedcover.__version__, "torch": torch.__version__, **package_versions}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument(
        "--docs", action="store_true", help="write the table of docs/tracing.md and run nothing"
    )
    given = parser.parse_args()
    if given.docs:
        DOCUMENT.write_text(written(DOCUMENT.read_text(), rows_in(given.file)))
    else:
        run(given.file, given.only, given.limit)
