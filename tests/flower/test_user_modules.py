"""The user's own modules that travel inside a Flower App: which do, which do not, and what is
refused.
"""

import io
import sys
import zipfile
from pathlib import Path

import pytest

from fedcover import Experiment
from fedcover.errors import InvalidValue
from fedcover.flower.app_template import RunConfig, write_app
from fedcover.flower.user_modules import LARGEST, modules_of

POLICY = "def halves(view):\n    return [None for _ in view.cohort]\n"


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A folder on Python's path, like that of a TOML file; its imports are undone afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def written(folder, **files):
    for name, text in files.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_named_modules_travel_with_the_local_files_that_they_import(beside):
    written(
        beside,
        ways_own=f"import json, torch\nimport helpers_own\nfrom fedcover import windows\n{POLICY}",
        helpers_own="def lazy():\n    from deeper_own import x\n",
        deeper_own="x = 1\n",
        unrelated_own="x = 1\n",
    )
    (beside / "secret.json").write_text("{}")
    experiment = Experiment(policy="ways_own:halves", clients=4, active=2)
    assert sorted(modules_of(experiment, [beside])) == [
        "deeper_own.py",
        "helpers_own.py",
        "ways_own.py",
    ]
    assert modules_of(Experiment(), [beside]) == {}


def test_packages_travel_with_what_they_import_with_dots(beside):
    written(
        beside,
        pack_own__in____init__="from .ways import halves\n",
        pack_own__in__ways=f"from .inner import constants\nfrom .inner.more import *\n{POLICY}",
        pack_own__in__inner__in____init__="",
        pack_own__in__inner__in__constants="from ..sibling import y\n",
        pack_own__in__inner__in__more="",
        pack_own__in__sibling="y = 2\n",
        pack_own__in__unused="",
    )
    files = modules_of(Experiment(policy="pack_own.ways:halves", clients=4, active=2), [beside])
    inner = [f"pack_own/inner/{name}.py" for name in ("__init__", "constants", "more")]
    assert sorted(files) == [
        "pack_own/__init__.py",
        *inner,
        "pack_own/sibling.py",
        "pack_own/ways.py",
    ]
    assert files["pack_own/sibling.py"] == b"y = 2\n"


def test_installed_and_foreign_modules_do_not_travel(beside, tmp_path):
    written(beside, ways_there=POLICY)
    experiment = Experiment(policy="ways_there:halves", clients=4, active=2)
    assert modules_of(experiment, [tmp_path / "another"]) == {}
    installed = Experiment(policy="fedcover.policies.width:prefix", clients=4, active=2)
    assert modules_of(installed, [beside]) == {}


def test_modules_that_flower_leaves_out_are_refused(beside):
    written(beside, test_ways_own=POLICY, ways_large=POLICY + f"x = '{'x' * LARGEST}'\n")
    with pytest.raises(
        InvalidValue, match=r"test_ways_own\.py: Flower leaves files named test_\*\.py out"
    ):
        modules_of(Experiment(policy="test_ways_own:halves", clients=4, active=2), [beside])
    deep = Path(*"abcdefgh")
    (beside / "deep_own" / deep).mkdir(parents=True)
    (beside / "deep_own" / deep / "ways.py").write_text(POLICY)
    with pytest.raises(InvalidValue, match="may be 7 folders deep; got 9"):
        modules_of(
            Experiment(policy="deep_own.a.b.c.d.e.f.g.h.ways:halves", clients=4, active=2), [beside]
        )
    with pytest.raises(InvalidValue, match="at most 8,388,608 bytes to travel"):
        modules_of(Experiment(policy="ways_large:halves", clients=4, active=2), [beside])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flower's own patterns
def test_flower_carries_the_modules_of_an_app(tmp_path):
    """The bundle that Flower makes of the app has them, so that nodes have."""
    build = pytest.importorskip("flwr.cli.build")
    files = {"lib/__init__.py": b"", "lib/ways.py": b"x = 1\n", "nets.py": b"y = 2\n"}
    app = write_app(tmp_path / "app", RunConfig(Experiment().to_toml(), "runs/x"), files)
    bundle = build.build_fab_from_disk(app)
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        carried = {
            name: archive.read(name) for name in archive.namelist() if name.startswith("modules/")
        }
    assert carried == {f"modules/{path}": content for path, content in files.items()}
