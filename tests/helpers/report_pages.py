"""The data of a report page, and runs that try to become markup."""

import json
import re

import fedcover as fc
from fedcover.runs.metrics_log import read_lines
from tests.helpers.made_up import made_up_run, on_flower


def data_of(path):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())[1]
    )


def report(tmp_path, *folders):
    return data_of(fc.report(folders, tmp_path / "report.html"))


ATTACK = (
    '</script><script>document.title="owned"</script><img src=x '
    'onerror="document.title=1"><!--\u2028'
)


def attacked(folder):
    """A run that tries to become markup wherever a run can say something."""
    made_up_run(folder)
    toml = (folder / "experiment.toml").read_text()
    for key in ("name", "policy", "dataset", "fleet"):
        text = json.dumps(f"1x1.0{ATTACK}" if key == "fleet" else ATTACK, ensure_ascii=False)
        toml = (
            toml
            if key == "fleet"
            else re.sub(rf"^{key} = .*$", lambda _, k=key, t=text: f"{k} = {t}", toml, flags=re.M)
        )
    (folder / "experiment.toml").write_text(toml)
    (folder / "manifest.json").write_text(json.dumps({"commit": ATTACK, "custom": [ATTACK]}))
    (folder / "certificate.json").write_text(
        json.dumps({"kind": ATTACK, ATTACK: [{ATTACK: ATTACK}]})
    )
    lines = read_lines(folder / "metrics.jsonl")
    for line in lines:
        line["pictures"]["layers"] = {ATTACK: [3, 3], "b": [2, 2]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return on_flower(folder, why=ATTACK)
