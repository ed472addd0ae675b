"""Finished and stopped runs that several tests look at."""

import shutil
from functools import partial
from pathlib import Path

import pytest

import fedcover as fc
from tests.helpers.runs import tiny
from tests.helpers.stopped_runs import images


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a finished small run; not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    fc.run(tiny(keep_rounds=(0, 2, 3)), folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of the finished run, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


@pytest.fixture
def whole(tmp_path) -> Path:
    """The folder of a run that was never interrupted."""
    fc.run(tiny(), tmp_path / "whole")
    return tmp_path / "whole"


@pytest.fixture
def stopped(tmp_path) -> Path:
    """The folder of the same run as a crash after its third round would have left it."""
    return images(tmp_path / "stopped", partial(fc.run, tiny(), tmp_path / "stopped"))[3]
