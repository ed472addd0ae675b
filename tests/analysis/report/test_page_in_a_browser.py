"""The report page in a real browser: every plot is drawn, nothing complains, filters and keyboard
work.
"""

import json
import shutil
from statistics import stdev

import pytest

import fedcover as fc
from fedcover.runs.metrics_log import read_lines
from tests.helpers.browser import MISSING, Browser
from tests.helpers.made_up import made_up_run, on_flower
from tests.helpers.report_pages import ATTACK, attacked

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
PLOTS = ("accuracy", "loss", "gamma-round", "gamma-window", "noise")
TAB, ENTER, SPACE, LEFT, RIGHT, HOME, END, ESCAPE = map(chr, (
    0xE004, 0xE007, 0x20, 0xE012, 0xE014, 0xE011, 0xE010, 0xE00C,
))  # fmt: skip

CERTIFICATE = {
    "kind": "estimate",
    "bound": float("inf"),
    "replayed": list(range(100)),
    "constants": {"L": {"value": 17.25, "how": "by hand"}, "G": {"value": 1.5, "how": "seen"}},
    "bounds": {
        "one": {
            "name": "Theorem 1",
            "terms": {"start": 1.5},
            "conditions": [{"name": "rate", "holds": False}],
        }
    },
}


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def phone():
    with Browser(360, 740) as opened:
        yield opened


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A page about three policies with two seeds each, a run that has not ended and one whose loss
    is lost.
    """
    folder = tmp_path_factory.mktemp("runs")
    for policy in ("prefix", "rolling", "random"):
        for seed in (0, 1):
            made_up_run(folder / f"{policy}-{seed}", policy=policy, seed=seed, layers=3)
    slow = made_up_run(folder / "slow", policy="magnitude", done=2)
    lines = [
        {k: v for k, v in x.items() if k not in ("accuracy", "loss")}
        for x in read_lines(slow / "metrics.jsonl")
    ]
    (slow / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lost_run = made_up_run(folder / "lost", policy="full", layers=3)
    lines = [{**line, "loss": float("nan")} for line in read_lines(lost_run / "metrics.jsonl")]
    (lost_run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (lost_run / "certificate.json").write_text(json.dumps(CERTIFICATE))
    return fc.report(folder, folder / "report.html")


@pytest.fixture
def page(browser, compared):
    """The page, fresh; afterwards the console must be empty."""
    browser.scheme("light")
    browser.open(compared)
    yield browser
    assert browser.complaints() == []


def curves(browser, plot="accuracy"):
    return browser.run(f"return document.querySelectorAll('#{plot} path.curve').length")


def rows(browser):
    return browser.run(
        "return [...document.querySelectorAll('#runs ~ .card tbody "
        "th')].map(e => e.textContent.trim())"
    )


def click(browser, selector, text=None):
    script = """const found = [...document.querySelectorAll(arguments[0])]
      .filter(e => !arguments[1] || e.textContent.trim() === arguments[1]);
    if (!found.length) throw Error('no ' + arguments[0]); found[0].click();"""
    browser.run(script, selector, text)


def test_every_plot_is_drawn(page):
    assert {plot: curves(page, plot) for plot in PLOTS} == {
        "accuracy": 4, "loss": 3, "gamma-round": 5, "gamma-window": 5, "noise": 5
    }  # fmt: skip
    assert page.run("return document.querySelectorAll('#accuracy path.band').length") == 3
    assert page.run("return document.querySelectorAll('#cost g.dot').length") == 4
    for plot in (*PLOTS, "cost"):
        drawing = f"document.querySelector('#{plot} svg').getBoundingClientRect()"
        assert page.run(f"return {drawing}.width > 300 && {drawing}.height > 200")
        assert "NaN" not in page.run(f"return document.querySelector('#{plot}').innerHTML")
    assert len(rows(page)) == 5
    assert "no finite loss from round 1" in page.run(
        "return document.querySelector('#runs ~ .card').textContent"
    )
    assert "2 of 6 rounds" in page.run("return document.querySelector('#runs ~ .card').textContent")


def test_accuracy_is_shown_with_sample_standard_deviation(page, compared):
    data = json.loads(compared.read_text().split('id="data">')[1].split("</script>")[0])
    text = page.run("return document.querySelector('#runs ~ .card').textContent")
    groups = [
        [data["runs"][place]["totals"]["accuracy"] for place in each["runs"]]
        for each in data["groups"]
    ]
    for accuracies in groups:
        assert len(accuracies) < 2 or f" ± {100 * stdev(accuracies):.1f}" in text


def test_axis_ticks_enclose_the_lines(page):
    heights = """const plot = document.querySelector('#' + arguments[0]);
      const marks = [...plot.querySelectorAll('.gridline')].map(e => e.y1.baseVal.value);
      const boxes = [...plot.querySelectorAll('.curve')].map(e => e.getBBox());
      return [marks, boxes.flatMap(box => [box.y, box.y + box.height])]"""
    for plot in ("accuracy", "loss", "noise"):
        marks, lines = page.run(heights, plot)
        assert 4 <= len(marks) <= 6, plot
        assert min(marks) - 0.1 <= min(lines), plot
        assert max(lines) <= max(marks) + 0.1, plot


def test_table_rows_do_not_wrap_at_an_ordinary_width(browser, tmp_path):
    for policy in ("full", "rolling(spread=true)"):
        for seed in (0, 1):
            made_up_run(
                tmp_path / "runs" / f"{policy[:4]}{seed}",
                7,
                policy=policy,
                seed=seed,
                rounds=8,
                layers=1,
            )
    browser.open(fc.report(tmp_path / "runs", tmp_path / "report.html"))
    high = (
        "return [...document.querySelectorAll('#runs ~ .card tbody tr')].map(e "
        "=> e.getBoundingClientRect().height)"
    )
    short, long = browser.run(high)
    assert short == long
    lines = """return [...document.querySelectorAll('.run span, .state')].map(e => {
      const range = document.createRange(); range.selectNodeContents(e);
      return range.getClientRects().length })"""
    assert set(browser.run(lines)) == {1}
    assert browser.run(
        "const box = document.querySelector('#runs ~ .card'); return "
        "box.scrollWidth <= box.clientWidth"
    )


def test_coverage_pictures_follow_the_chosen_round(page):
    page.wait("return document.querySelectorAll('#coverage table canvas').length === 3 * 12")
    painted = """return [...document.querySelectorAll('#coverage table canvas')].filter(c => {
      const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      return new Set(pixels).size > 2 }).length"""
    assert page.run(painted) >= 3 * 5
    labels = (
        "return [...document.querySelectorAll('#coverage table "
        "canvas')].map(c => c.ariaLabel).join()"
    )
    before = page.run(labels)
    page.run("document.querySelector('#coverage input[type=range]').focus()")
    page.press(LEFT)
    assert (
        page.run("return document.querySelector('#coverage output').textContent") == "round 5 of 6"
    )
    assert page.run(labels) != before
    page.press(HOME)
    assert (
        page.run("return document.querySelector('#coverage output').textContent") == "round 1 of 6"
    )
    click(page, "#coverage button", "Play")
    page.wait("return document.querySelector('#coverage output').textContent === 'round 6 of 6'")


def test_filters_change_the_table_and_every_plot(page):
    click(page, "[data-setting=policy] input")
    matching_rows = rows(page)
    assert len(matching_rows) == 4
    assert curves(page, "noise") == 4
    assert page.run("return document.querySelector('[role=status]').textContent") == "4 of 5 shown"
    click(page, "button", "Show all")
    assert len(rows(page)) == 5
    page.run("document.querySelector('input[type=search]').focus()")
    page.press(*"ROLL")
    assert rows(page) == ["rolling"]
    assert curves(page) == 1
    click(page, "button", "Show all")
    assert page.run("return document.querySelector('input[type=search]').value") == ""
    click(page, "[data-setting=seed] input")  # seed 0: the two odd runs are gone, and all bands
    assert len(rows(page)) == 3
    assert page.run("return document.querySelectorAll('path.band').length") == 0


def test_filters_without_matches_are_named(page):
    page.run("document.querySelector('input[type=search]').focus()")
    page.press(*"zzz")
    for place in ("#accuracy", "#cost", "#runs ~ .card"):
        text = page.run("return document.querySelector(arguments[0]).textContent", place)
        assert "No run matches" in text
        assert "Nothing to draw yet" not in text
    click(page, "button", "Show all")
    page.run("for (const button of document.querySelectorAll('.legend button')) button.click()")
    assert "Every run is hidden" in page.run(
        "return document.querySelector('#accuracy').textContent"
    )


def test_filter_with_many_values_works_by_keyboard(page):
    page.run("document.querySelector('[data-setting=policy] select').focus()")
    page.press(*"rand")
    assert rows(page) == ["random"]
    chips = (
        "return [...document.querySelectorAll('[data-setting=policy] input')].map(e => e.checked)"
    )
    assert page.run(chips) == [False, False, False, True, False]
    click(page, "[data-setting=policy] input")  # a further one
    assert page.run("return document.querySelector('[data-setting=policy] select').value") == "some"
    assert rows(page) == ["full", "random"]
    click(page, "button", "Show all")
    assert page.run("return document.querySelector('[data-setting=policy] select').value") == "all"
    assert len(rows(page)) == 5
    assert "“only” takes one of them" in page.run(
        "return document.querySelector('.filters').textContent"
    )


def test_names_are_sorted_naturally(browser, tmp_path):
    runs = [made_up_run(tmp_path / f"r{rate}", lr=rate, layers=1) for rate in (0.011, 0.1, 0.02)]
    browser.open(fc.report(runs, tmp_path / "report.html"))
    chips = (
        "return [...document.querySelectorAll('[data-setting=lr] .chip')].map(e => e.textContent)"
    )
    assert browser.run(chips) == ["0.011", "0.02", "0.1"]
    assert rows(browser) == ["lr 0.011", "lr 0.02", "lr 0.1"]
    for expected in (["lr 0.011", "lr 0.02", "lr 0.1"], ["lr 0.1", "lr 0.02", "lr 0.011"]):
        click(browser, "#runs ~ .card thead button", "runs")
        assert rows(browser) == expected


def test_seeds_and_costs_can_be_shown(page):
    click(page, "#single")
    assert curves(page) == 7
    page.run(
        "const s = document.querySelector('#axis'); s.value = 'moved'; "
        "s.dispatchEvent(new Event('change'))"
    )
    assert "megabytes moved" in page.run(
        "return document.querySelector('#accuracy svg').textContent"
    )


def test_columns_sort_and_plots_have_tables(page):
    click(page, "#runs ~ .card thead button", "accuracy")
    first = rows(page)
    click(page, "#runs ~ .card thead button", "accuracy")
    assert rows(page) == first[::-1]
    assert page.run("return document.activeElement.textContent") == "accuracy"
    for plot in (*PLOTS, "cost", "coverage"):
        click(page, f"#{plot} summary")
        page.wait(f"return document.querySelectorAll('#{plot} details tbody tr').length > 0")


def test_keyboard_reaches_every_control(page):
    stops = set()
    page.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    for _ in range(80):
        page.press(TAB)
        stops.add(
            page.run(
                "const e = document.activeElement; return e.ariaLabel || e.textContent || e.id"
            )
        )
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") != "none"
    for expected in (
        "Theme: auto",
        "Show all",
        "rolling",
        "horizontal axis",
        "Find runs by name",
        "Play",
        "round",
        "run in detail",
    ):
        assert expected in stops, expected
    assert any("Accuracy: chart" in stop for stop in stops)


def test_plots_can_be_read_with_arrow_keys(page):
    page.run("document.querySelector('#accuracy .plot').focus()")
    page.press(RIGHT, RIGHT)
    text = page.run(
        "return document.querySelector('#accuracy .plot').getAttribute('aria-valuetext')"
    )
    assert text.startswith("round 2: ")
    assert "prefix" in text
    assert page.run("return !document.querySelector('#accuracy .tip').hidden")
    page.press(END)
    assert "round 6: " in page.run(
        "return document.querySelector('#accuracy .plot').getAttribute('aria-valuetext')"
    )
    page.press(ESCAPE)
    assert page.run("return document.querySelector('#accuracy .tip').hidden")


def test_legend_hides_lines_by_keyboard(page):
    page.run("document.querySelector('.legend button').focus()")
    page.press(SPACE)
    assert curves(page, "noise") == 4
    assert page.run("return document.activeElement.getAttribute('aria-pressed')") == "false"
    page.press(ENTER)
    assert curves(page, "noise") == 5


def test_run_details_are_shown(page):
    page.run(
        "const s = document.querySelector('#which'); s.value = '0'; "
        "s.dispatchEvent(new Event('change'))"
    )
    assert "lost" in page.run("return document.querySelector('#experiment pre').textContent")
    certificate = page.run("return document.querySelector('#certificate').textContent")
    for text in (
        "estimate",
        "bound",
        "inf",
        "0 … 99",
        "17.25",
        "by hand",
        "Theorem 1",
        "start 1.5",
        "✗ does not hold: rate",
    ):
        assert text in certificate, text
    assert page.run("return document.querySelectorAll('#fleet tbody tr').length") == 2
    assert "fedcover run experiment.toml" in page.run(
        "return document.querySelector('#experiment').textContent"
    )
    assert (
        page.run("return document.querySelectorAll('#experiment mark').length") == 1
    )  # the policy
    click(page, "#runs ~ .card tbody button")
    assert page.run("return document.querySelector('#which').selectedIndex") == 0


def test_answers_of_devices_are_in_a_table(browser, tmp_path):
    browser.open(fc.report(on_flower(made_up_run(tmp_path / "run")), tmp_path / "report.html"))
    cells = (
        "return [...document.querySelectorAll('#answers tbody "
        "tr:first-child > *')].map(e => e.textContent)"
    )
    assert browser.run(cells) == [
        "1 to 6",
        "rejected",
        "6",
        "client 4",
        "12 of 500 numbers are not finite",
    ]
    assert "6 answered, 6 rejected, 1 late" in browser.run(
        "return document.querySelector('#answers p').textContent"
    )
    assert browser.complaints() == []


def test_theme_can_be_light_or_dark(page):
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.scheme("dark")
    dark = page.run(background)
    assert light != dark
    click(page, "#theme")
    assert page.run(background) == light
    click(page, "#theme")
    assert page.run(background) == dark
    page.wait("return document.querySelectorAll('#coverage table canvas').length > 0")


def test_page_fits_a_phone(phone, compared):
    phone.open(compared)
    phone.wait("return document.querySelectorAll('#coverage table canvas').length > 0")
    for plot in PLOTS:
        phone.run(f"document.querySelector('#{plot} .plot').focus()")
        phone.press(RIGHT)
        assert phone.run("return document.documentElement.scrollWidth <= innerWidth")
    assert {plot: curves(phone, plot) > 0 for plot in PLOTS} == dict.fromkeys(PLOTS, True)
    assert phone.complaints() == []


def test_fleet_bars_match_shares_on_a_phone(phone, tmp_path):
    made_up_run(tmp_path / "run", fleet="4x1.0 + 6x0.5")
    phone.open(fc.report(tmp_path / "run", tmp_path / "report.html"))
    few, many = phone.run(
        "return [...document.querySelectorAll('.meter i')].map(e => "
        "e.getBoundingClientRect().width)"
    )
    assert few / many == pytest.approx(4 / 6, abs=0.01)


def test_phone_shows_accuracy_and_a_scroll_hint(phone, compared):
    phone.open(compared)
    cells = """const box = document.querySelector('#runs ~ .card');
      return [...box.querySelectorAll('tbody td:nth-child(2)')].map(e =>
        [e.textContent, e.getBoundingClientRect().right <= box.getBoundingClientRect().right])"""
    assert [("%" in text, shortened) for text, shortened in phone.run(cells)].count(
        (True, True)
    ) == 4  # one has none yet
    hint = (
        "return getComputedStyle(document.querySelector('#runs ~ .card'), "
        "'::after').content.includes('scroll')"
    )
    phone.wait(hint)
    phone.run("document.querySelector('#runs ~ .card').scrollLeft = 9999")
    phone.wait(hint.replace("return ", "return !"))
    assert phone.complaints() == []


def test_legend_is_below_plots_on_a_phone(phone, compared):
    phone.open(compared)
    named = (
        "return [...document.querySelectorAll('#noise .ends li')].map(e "
        "=> e.textContent).sort().join()"
    )
    assert phone.run(named) == "full,magnitude,prefix,random,rolling"


def test_run_name_stays_text(browser, tmp_path):
    browser.open(fc.report(attacked(tmp_path / "evil"), tmp_path / "report.html", title=ATTACK))
    assert browser.run("return document.title") == ATTACK
    browser.wait("return document.querySelectorAll('#coverage table canvas').length > 0")
    assert browser.run("return document.querySelector('h1').textContent") == ATTACK
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.run("return document.scripts.length") == 2
    assert browser.complaints() == []


def test_omitted_runs_are_listed_on_the_page(browser, tmp_path):
    made_up_run(tmp_path / "runs" / "a")
    shutil.copytree(tmp_path / "runs" / "a", tmp_path / "runs" / "b")
    browser.open(fc.report(tmp_path / "runs", tmp_path / "report.html"))
    assert browser.run("return document.querySelector('#notes').textContent").endswith(
        f"as {tmp_path / 'runs' / 'a'}"
    )
    assert browser.run(
        "return document.querySelector('#runs ~ .card tbody').textContent.includes('seed 0')"
    )


def test_run_without_rounds_is_shown(browser, tmp_path):
    browser.open(fc.report(made_up_run(tmp_path / "new", done=0), tmp_path / "report.html"))
    assert "no round done yet" in browser.run("return document.body.textContent")
    assert "Nothing to draw yet" in browser.run(
        "return document.querySelector('#accuracy').textContent"
    )
    assert browser.complaints() == []


def test_seeds_without_rounds_are_left_out_of_means(browser, tmp_path):
    for seed, rounds_done in enumerate((6, 6, 0)):
        made_up_run(tmp_path / "runs" / str(seed), seed=seed, done=rounds_done)
    browser.open(fc.report(tmp_path / "runs", tmp_path / "report.html"))
    assert browser.run(
        "return document.querySelector('#runs ~ .card tbody').textContent.includes('2 of 3 seeds')"
    )
    assert browser.complaints() == []


def test_plots_of_fifty_groups_and_a_thousand_rounds_are_drawn(browser, tmp_path):
    runs = [
        made_up_run(tmp_path / f"r{n}", rounds=1000 if n == 0 else 20, lr=0.01 + n, layers=1)
        for n in range(50)
    ]
    browser.open(fc.report(runs, tmp_path / "report.html"))
    assert curves(browser) == 50
    assert browser.run("return document.body.textContent.includes('Long runs are thinned')")
    assert browser.complaints() == []
