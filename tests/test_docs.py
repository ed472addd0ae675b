"""The documents say what is there: every field, every figure, and examples that run."""

import re
import tomllib

import pytest

import fedcover as fc
from fedcover.runs.experiment import Experiment
from tests.helpers.repository import ROOT

FIELDS = (ROOT / "docs" / "experiment.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_experiment_fields_are_documented_with_defaults():
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", FIELDS, re.MULTILINE))
    assert documented.keys() == Experiment.model_fields.keys()
    defaults = Experiment().model_dump(mode="json")
    for name, text in documented.items():
        if name == "name":
            continue
        words = {"None": "none", "False": "false"}
        expected = words.get(str(defaults[name]), str(defaults[name]))
        assert text.strip().strip("`") == expected.removesuffix(".0"), name


def test_metrics_are_documented():
    run = fc.run(fc.Experiment(clients=20, active=4, rounds=1, epochs=1, validation=0.1))
    for name in {*run.summary, *run.metrics[0]} - {
        "round",
        "rounds",
        "lr",
        "train_loss",
        "clients",
        "dropped",
    }:
        assert f"`{name}`" in METRICS or name == "validation_loss", name


def test_readme_experiment_is_valid():
    (text,) = blocks("toml")
    assert Experiment(**tomllib.loads(text)).policy == "rolling(spread=true)"


def run_page(path):
    """Run the Python of a page from top to bottom; return its names and the output that
    it shows.
    """
    page = path.read_text()
    names: dict[str, object] = {}
    for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(text, path.name, "exec"), names)
    expected_outputs = re.findall(
        r"```python\n[^`]*print\([^`]*```\n\n```\n(.*?)```", page, re.DOTALL
    )
    return names, "".join(expected_outputs)


def assert_same_output(printed, shown):
    """The same words; the same numbers, but for the last digits of accuracies."""
    assert len(printed.split()) == len(shown.split())
    for word, expected in zip(printed.split(), shown.split(), strict=True):
        if re.fullmatch(r"0\.\d+[,;]?", expected):
            assert float(word.strip(",;")) == pytest.approx(float(expected.strip(",;")), abs=0.05)
        else:
            assert word == expected


def test_readme_code_prints_what_it_shows(capsys):
    names, expected_outputs = run_page(ROOT / "README.md")
    assert names["run"].accuracy > 0.9
    assert_same_output(capsys.readouterr().out, expected_outputs)


@pytest.mark.parametrize("page", ["tutorial", "own-model", "data", "coverage"])
def test_page_code_prints_what_it_shows(page, capsys, tmp_path, monkeypatch):
    if page in ("tutorial", "coverage"):
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    _, expected_outputs = run_page(ROOT / "docs" / f"{page}.md")
    assert_same_output(capsys.readouterr().out, expected_outputs)
    if page == "tutorial":
        assert (tmp_path / "rolling.svg").is_file()
        assert (tmp_path / "report.html").is_file()


def test_own_parts_page_code_runs(capsys):
    page = (ROOT / "docs" / "own-parts.md").read_text()
    names: dict[str, object] = {}
    for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(text, "own-parts.md", "exec"), names)
    assert [round for round, _ in names["history"]] == [0, 1]
    assert capsys.readouterr().out == "1 of 2 rounds\n"


@pytest.mark.parametrize(
    "named",
    [
        {"recipe": "smoothed(amount=0.05)"},
        {"recipe": "near"},
        {"rule": "agreed"},
        {"server": "half_steps(lr=0.8)"},
        {"model": "two_layers(width=24)"},
        {"dataset": "halves(samples=900)"},
        {"partition": "growing"},
        {"schedule": "warm(first=3)"},
    ],
    ids=str,
)
def test_own_parts_page_functions_work_by_name(named, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "own-parts.md").read_text()
    functions = page.split("With these functions")[0]
    (tmp_path / "page_parts.py").write_text(
        "\n".join(re.findall(r"```python\n(.*?)```", functions, re.DOTALL))
    )
    monkeypatch.syspath_prepend(tmp_path)
    fields = {field: f"page_parts:{name}" for field, name in named.items()}
    shared = {
        "fleet": "1x1.0 + 1x0.5",
        "policy": "rolling",
        "clients": 20,
        "rounds": 5,
        "epochs": 2,
    }
    assert fc.run(fc.Experiment(**shared, **fields)).accuracy > 0.5


def test_pages_install_from_the_checkout():
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("src/**/*.py"),
    ]
    pages += ROOT.glob("examples/**/*.ipynb")
    wrong = re.compile(r"""pip install (--\S+ )*\\?["']?fedcover(?!\[\w+\] @)""")
    assert [path.name for path in pages if wrong.search(path.read_text())] == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {
        name
        for path in pages
        for name in re.findall(r"pip install '\.\[(\w+)\]'", path.read_text())
    }
    assert named
    assert named <= extras.keys()
