"""The report page: what it says of a run, and that no text of a run becomes markup."""

import base64
import json
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from statistics import stdev

import pytest

import fedcover as fc
from fedcover.analysis.report.page import asset
from tests.helpers.made_up import made_up_run, on_flower
from tests.helpers.report_pages import ATTACK, attacked, data_of, report


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_page_spread_equals_sweep_spread():
    values = [0.91, 0.935, 0.99, 0.75]
    script = f"{asset('elements.js')}; console.log(deviation({values}))"
    process = subprocess.run(
        ["node", "-e", script], capture_output=True, text=True, check=True
    ).stdout
    assert float(process) == pytest.approx(stdev(values), rel=1e-12)


def test_page_shows_pictures_fleet_and_commands_of_a_run(tmp_path):
    fields = {
        "clients": 20,
        "active": 4,
        "rounds": 2,
        "epochs": 1,
        "fleet": "1x1.0 + 3x0.5",
        "policy": "rolling",
    }
    machine = fc.Machine("sequential", "cpu", threads=1, precision="bf16")
    fc.run(fc.Experiment(name="real", **fields), tmp_path / "real", machine=machine)
    (run,) = report(tmp_path, tmp_path / "real")["runs"]
    assert run["scores"]["round"] == [1, 2]
    assert len(run["every"]["gamma_round"]) == 2
    frames = json.loads(zlib.decompress(base64.b64decode(run["pictures"])))
    assert [frame["round"] for frame in frames["frames"]] == [1, 2]
    assert [row["devices"] for row in run["fleet"]] == [1, 3]
    assert sum(row["updates"] for row in run["fleet"]) == 8
    how = "--engine sequential --device cpu --threads 1 --precision bf16 --processes 1"
    assert run["commands"] == [f"fedcover run experiment.toml {how}"]
    assert fc.Experiment.from_toml(run["toml"]).policy == "rolling"


def test_flower_run_shows_missing_answers_and_flower_commands(tmp_path):
    (entry,) = report(tmp_path, on_flower(made_up_run(tmp_path / "run", done=3)))["runs"]
    assert entry["answers"]["counts"] == {"answered": 3, "rejected": 3, "late": 1}
    refused, late = entry["answers"]["causes"]
    assert (refused["who"], refused["times"], refused["rounds"]) == ("client 4", 3, "1 to 3")
    assert (late["who"], late["why"], late["rounds"]) == ("node 7", "no answer in 5 s", "2")
    again, go_on = entry["commands"]
    assert again == "fedcover flower up --nodes N experiment.toml"
    assert go_on == f"fedcover flower up --nodes N {tmp_path / 'run'}"


def test_repeated_round_counts_its_last_answers(tmp_path):
    folder = on_flower(made_up_run(tmp_path / "run", done=3))
    path = folder / "events.jsonl"
    again = [
        {"round": 2, "event": "answered", "node": 1, "client": client, "why": ""}
        for client in (2, 4)
    ]
    path.write_text(path.read_text() + "".join(json.dumps(event) + "\n" for event in again))
    (entry,) = report(tmp_path, folder)["runs"]
    assert entry["answers"]["counts"] == {"answered": 4, "rejected": 2, "late": 1}
    assert [(cause["times"], cause["rounds"]) for cause in entry["answers"]["causes"]] == [
        (2, "1 to 2"),
        (1, "2"),
    ]


def test_manifest_values_are_quoted_in_commands(tmp_path):
    folder = made_up_run(tmp_path / "run")
    (folder / "manifest.json").write_text(
        json.dumps({"engine": "$(id)", "device": "cpu; rm -rf ~", "threads": 2})
    )
    (command,) = report(tmp_path, folder)["runs"][0]["commands"]
    assert shlex.split(command)[3:] == [
        "--engine",
        "$(id)",
        "--device",
        "cpu; rm -rf ~",
        "--threads",
        "2",
    ]
    assert "'cpu; rm -rf ~'" in command
    assert "'$(id)'" in command


def test_causes_of_missing_answers_are_limited_on_the_page(tmp_path):
    folder = made_up_run(tmp_path / "run")
    events = [
        {"round": 0, "event": "lost", "node": 1, "client": n, "why": f"{n} " * 500}
        for n in range(2_000)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (entry,) = report(tmp_path, folder)["runs"]
    assert entry["answers"]["counts"] == {"lost": 2_000}
    assert len(entry["answers"]["causes"]) + entry["answers"]["more"] == 2_000
    assert len(json.dumps(entry["answers"])) < 20_000


def test_run_in_one_process_shows_no_answers(tmp_path):
    assert report(tmp_path, made_up_run(tmp_path / "run"))["runs"][0]["answers"] is None


class Tags(HTMLParser):
    """Every element and attribute that a browser would see."""

    def __init__(self):
        super().__init__()
        self.found, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.attributes += attrs


def test_text_of_a_run_never_becomes_markup(tmp_path):
    folder = attacked(tmp_path / "evil")
    path = fc.report(folder, tmp_path / "report.html", title=ATTACK)
    tags = Tags()
    tags.feed(path.read_text())
    assert tags.found.count("script") == 2
    assert "img" not in tags.found
    assert not any(name.startswith("on") or name == "src" for name, _ in tags.attributes)
    assert data_of(path)["title"] == ATTACK
    assert data_of(path)["runs"][0]["name"] == ATTACK


def test_page_makes_no_network_requests(tmp_path):
    text = fc.report(made_up_run(tmp_path / "run"), tmp_path / "report.html").read_text()
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {
        "http://www.w3.org/2000/svg"
    }  # a name, not an address
    assert "default-src 'none'" in text
    for script in re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|import\(", text
    ):
        pytest.fail(f"the page uses {script}")


def test_report_needs_no_torch(tmp_path):
    folder = made_up_run(tmp_path / "run")
    program = f"""
import sys
for name in ("torch", "numpy", "pydantic", "rich", "cyclopts", "matplotlib"):
    sys.modules[name] = None
import fedcover
print(fedcover.report({str(folder)!r}, {str(tmp_path / "report.html")!r}))
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip().endswith("report.html")
