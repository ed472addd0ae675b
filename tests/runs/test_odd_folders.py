"""A broken run folder never hides the others; what it says is shown as text; its rounds are counted
once, by their content.
"""

import csv
import io
import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import fedcover as fc
from fedcover.analysis import history
from fedcover.analysis.report.collect import collect_runs
from fedcover.analysis.report.page import page
from fedcover.cli.live_view import read_run_view, render
from fedcover.errors import RunError
from fedcover.runs.checkpoints import list_checkpoints
from fedcover.runs.metrics_log import read_lines
from fedcover.runs.run_folder import Folder
from tests.helpers.command_line import refused
from tests.helpers.made_up import made_up_run, on_flower
from tests.helpers.report_pages import report
from tests.helpers.runs import assert_same_end, tiny

# ── one odd folder ────────────────────────────────────────────────────────────────────────────────

ODD = [
    'fleet = "many"',
    'fleet = "1x"',
    "fleet = 3",
    'fleet = "1xnan"',
    'fleet = "1x2.0"',
    'fleet = ""',
    "evaluate_every = 0",
    "evaluate_every = -1",
    'evaluate_every = "x"',
    "evaluate_every = 1.5",
    "evaluate_every = []",
    "rounds = 0",
    "rounds = -3",
    "rounds = inf",
    "rounds = nan",
    "rounds = true",
    'rounds = "many"',
    "rounds = [1]",
    "seed = []",
    "seed = {}",
    "seed = -1",
    'seed = "a"',
    "seed = 1979-05-27",
    "seed = nan",
    f"seed = {'9' * 400}",
    f"seed = {'9' * 5000}",
    "lr = 1979-05-27",
    "lr = {a = 1}",
    f"lr = {'9' * 400}",
    "lr = [[1]]",
    f"lr = {'[' * 2000}{']' * 2000}",
    "policy = 07:32:00",
]


@pytest.mark.parametrize("line", ODD, ids=lambda line: line[:30])
def test_odd_setting_does_not_hide_other_runs(line, tmp_path, caplog):
    made_up_run(tmp_path / "runs" / "whole")
    path = made_up_run(tmp_path / "runs" / "odd") / "experiment.toml"
    field = line.split(" =")[0]
    lines = [text for text in path.read_text().splitlines() if not text.startswith(f"{field} =")]
    path.write_text("\n".join([*lines, line]))
    data = report(tmp_path, tmp_path / "runs")
    assert [run["name"] for run in data["runs"]] == ["whole"]
    assert len(data["notes"]) == 1
    assert data["notes"][0].startswith(f"a run is left out: {path} cannot be read: ")
    assert len(data["notes"][0]) < 500
    assert caplog.messages == data["notes"]


DEEP = "[" * 3000 + "]" * 3000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("manifest.json", DEEP),
        ("certificate.json", DEEP),
        ("certificate.json", '{"a": ' + DEEP[2500:-2500] + "}"),
        ("manifest.json", '{"custom": 5}'),
        ("manifest.json", '{"custom": {"a": 1}, "engine": [1], "threads": {}}'),
        ("manifest.json", '{"a": ' + DEEP[2500:-2500] + "}"),
        ("events.jsonl", '{"round": 0, "event": ["late"]}\n'),
        ("events.jsonl", '{"round": 0, "event": "late", "client": [[]], "why": {}}\n'),
        ("events.jsonl", DEEP),
    ],
    ids=str,
)
def test_odd_file_does_not_hide_other_runs(name, text, tmp_path):
    made_up_run(tmp_path / "runs" / "whole", lr=0.2)
    (on_flower(made_up_run(tmp_path / "runs" / "odd")) / name).write_text(text)
    data = report(tmp_path, tmp_path / "runs")
    assert "whole" in [run["name"] for run in data["runs"]]
    assert len(data["runs"]) + len(data["notes"]) == 2


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63])
    | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_page_is_written_for_any_metrics_line(data, tmp_path):
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    path = made_up_run(folder, rounds=2) / "metrics.jsonl"
    lines = read_lines(path)
    place = lines[data.draw(st.integers(0, 1))]
    if data.draw(st.booleans()):
        place = place["clients"][data.draw(st.sampled_from(sorted(place["clients"])))]
    place[data.draw(st.sampled_from([*place, "lost"]))] = data.draw(VALUES)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    gathered = collect_runs([folder])
    assert page(gathered, "x")
    history.as_csv(history.metric_rows(gathered.records))
    history.as_json(history.metric_rows(gathered.records))
    view = read_run_view(folder)
    Console(file=io.StringIO()).print(render(view))
    json.dumps(view.summary())


HUGE = "9" * 400


@pytest.mark.parametrize(
    "figure", [f'"accuracy": {HUGE}', f'"gamma_round": {HUGE}', f'"seconds": {{"policy": {HUGE}}}']
)
def test_impossible_numbers_are_not_shown(figure, tmp_path):
    folder = made_up_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"round": 5, {figure}}}\n')
    stream = io.StringIO()
    Console(file=stream).print(render(read_run_view(folder)))
    assert "9" * 20 not in stream.getvalue()


# ── shown as text ─────────────────────────────────────────────────────────────────────────────────

ESCAPES = "\\u001b]0;owned\\u0007\\u001b[2J\\u202e"


@pytest.fixture
def hostile(tmp_path):
    """A run whose name and figures are commands to terminals and spreadsheets."""
    folder = made_up_run(tmp_path / "run")
    toml = (folder / "experiment.toml").read_text()
    (folder / "experiment.toml").write_text(toml.replace('name = "run"', f'name = "=1+1{ESCAPES}"'))
    lines = read_lines(folder / "metrics.jsonl")
    text = "".join(
        json.dumps({**line, "@SUM(1)": 1, "\x1b[2J": -2.5, "\t=1": 3}) + "\n" for line in lines
    )
    (folder / "metrics.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize(
    "words", [("history",), ("history", "--csv"), ("history", "--json"), ("watch", "--once")]
)
def test_terminal_codes_are_not_shown(words, hostile, fedcover):
    code, out, err = fedcover(*words, hostile)
    assert code == 0, err
    assert [sign for sign in out if not sign.isprintable() and sign != "\n"] == []


def test_errors_on_a_folder_show_no_terminal_codes(hostile, fedcover):
    (hostile / "experiment.toml").write_text(f'policy = "{ESCAPES}"')
    for words in (("resume",), ("export",), ("report",)):
        _, out, err = fedcover(*words, hostile)
        assert [sign for sign in out + err if not sign.isprintable() and sign != "\n"] == []


def test_csv_cells_hold_no_formulas(hostile, fedcover):
    _, out, _ = fedcover("history", "--csv", hostile)
    head, *metric_rows = csv.reader(io.StringIO(out))
    assert [cell for cell in head if cell.lstrip("'")[:1] in "=+-@"] == ["'@SUM(1)"]
    assert {row[0] for row in metric_rows} == {"'=1+1?]0;owned??[2J?"}
    assert {row[head.index("?[2J")] for row in metric_rows} == {"-2.5"}  # a number remains one


# ── rounds ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def whole(tmp_path):
    fc.run(tiny(rounds=4), tmp_path / "whole")
    return tmp_path / "whole"


def test_round_written_twice_is_counted_once(whole, tmp_path):
    summary = fc.load(whole).summary
    lines = (whole / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (whole / "metrics.jsonl").write_bytes(
        b"".join([lines[0], lines[2], lines[0], lines[3], *lines[1:]])
    )
    run = fc.load(whole)
    assert [line["round"] for line in run.metrics] == [0, 1, 2, 3]
    assert run.summary == summary
    before = (whole / "summary.json").read_bytes()
    fc.resume(whole)
    assert (whole / "summary.json").read_bytes() == before
    assert (whole / "metrics.jsonl").read_bytes() == b"".join(lines)
    assert report(tmp_path, whole)["runs"][0]["totals"]["rounds"] == 4


def test_last_line_of_a_round_counts(whole):
    """A round that is run again after a stop tells anew."""
    last = fc.load(whole).metrics[-1]
    with (whole / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**last, "accuracy": 0.5}) + "\n")
    assert fc.load(whole).accuracy == 0.5


def renamed(file, round):
    """A checkpoint under the name of another round."""
    return file.path.rename(file.path.with_name(f"round-{round:06d}.{file.digest}.safetensors"))


@pytest.mark.parametrize("round", [4, 7, 1])
def test_checkpoint_round_is_read_from_its_content(round, whole, tmp_path):
    stopped = tmp_path / "stopped"
    fc.run(tiny(rounds=4), stopped)
    newest, older = list_checkpoints(stopped / "checkpoints")
    newest.path.unlink()
    path = renamed(older, round)
    with pytest.raises(RunError, match=f"{path.name} holds round 3, not {round} as its name says"):
        fc.resume(stopped)
    renamed(list_checkpoints(stopped / "checkpoints")[0], 3)
    fc.resume(stopped)
    assert_same_end(stopped, whole)


def test_renamed_kept_state_is_not_replayed(tmp_path):
    fc.run(tiny(rounds=3, keep_rounds=[1]), tmp_path / "run")
    renamed(list_checkpoints(Folder(tmp_path / "run").kept)[0], 2)
    with pytest.raises(RunError, match="holds round 1, not 2 as its name says"):
        fc.replay(tmp_path / "run", 2)


def test_odd_setting_is_one_sentence(tmp_path, fedcover):
    path = made_up_run(tmp_path / "run") / "experiment.toml"
    path.write_text('name = "run"\nfleet = "\\u001b[2J"')
    refused(fedcover("report", tmp_path / "run"), 1, "fleet must look like")
