"""The page in a real browser: no errors, charts drawn, slider, sorting, zoom; wide and narrow, light and dark."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from dale.reports.page import write_report
from dale.reports.runs import read_runs

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
CHARTS = ("losses", "duals", "heldout", "radius", "tradeoff", "classes", "projection", "pace")


@contextmanager
def opened(browser, path, size="desktop", scheme="light"):
    """The page, opened; whatever it logs as an error or tries to fetch fails the test."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    problems, fetched = [], []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else fetched.append(r.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=10_000)
    yield page
    context.close()
    assert problems == []
    assert fetched == []


def pointed_at(page, name, across):
    """Move the mouse over a chart, `across` of the way from left to right."""
    chart = page.locator(f"#{name} svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    place = box["x"] + box["width"] * across, box["y"] + box["height"] / 2
    page.mouse.move(*place)
    return place


@pytest.fixture(scope="module")
def one(real_runs, tmp_path_factory):
    return write_report(read_runs(real_runs[:1])[0], tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def five(real_runs, tmp_path_factory):
    return write_report(read_runs(real_runs)[0], tmp_path_factory.mktemp("page") / "report.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_a_run_is_drawn_and_fits(browser, one, size, scheme):
    with opened(browser, one, size, scheme) as page:
        for name in CHARTS:
            assert int(page.get_attribute(f"#{name}", "data-points")) > 0, name
            assert page.locator(f"#{name} svg").bounding_box()["height"] > 150, name
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        assert page.locator(".tile").count() >= 3
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(16, 21, 27)") == (scheme == "dark")


def test_the_slider_changes_the_pictures(browser, one):
    with opened(browser, one) as page:
        picture = page.locator(".card img").nth(2)
        slider = page.locator("#epsilon")
        assert "as trained" in page.inner_text("#epsilon-value")
        before = picture.get_attribute("src")
        slider.fill("0")
        assert page.inner_text("#epsilon-value") == "ε = 0"
        assert picture.get_attribute("src") != before
        # without a perturbation the perturbed image is the clean one, pixel by pixel
        assert picture.get_attribute("src") == page.locator(".card img").first.get_attribute("src")
        assert picture.evaluate("i => i.naturalWidth") == 8
        slider.focus()
        page.keyboard.press("End")
        assert page.inner_text("#epsilon-value") == "ε = 0.5"


def test_hover_zoom_and_series(browser, one):
    with opened(browser, one) as page:
        middle = pointed_at(page, "losses", 0.2)
        tip = page.locator("#losses .tip")
        assert tip.is_visible()
        assert "nominal loss" in tip.inner_text()
        assert page.get_attribute("#losses", "data-zoomed") == "no"
        page.mouse.down()
        page.mouse.move(middle[0] + 120, middle[1] + 60, steps=3)
        page.mouse.up()
        assert page.get_attribute("#losses", "data-zoomed") == "yes"
        page.locator("#losses .tools button", has_text="Reset").click()
        assert page.get_attribute("#losses", "data-zoomed") == "no"
        page.locator("#losses .tools button").first.click()
        assert page.get_attribute("#losses", "data-zoomed") == "yes"
        before = int(page.get_attribute("#losses", "data-points"))
        button = page.locator("#losses .legend button").first
        button.click()
        assert page.locator("#losses .legend button").first.get_attribute("aria-pressed") == "false"
        assert int(page.get_attribute("#losses", "data-points")) < before


def test_the_papers_points_can_be_switched_on(browser, one):
    with opened(browser, one) as page:
        assert page.get_attribute("#tradeoff", "data-points") == "1"
        page.locator("#tradeoff .legend button", has_text="MNIST").click()
        assert page.get_attribute("#tradeoff", "data-points") == "11"


@pytest.mark.parametrize("size", list(SIZES))
def test_many_runs_sort_filter_and_overlay(browser, five, size):
    with opened(browser, five, size, "dark") as page:
        names = lambda: page.locator("#runs-body tr:visible td:first-child").all_inner_texts()  # noqa: E731
        column = page.locator("#runs-head th", has_text="clean")
        cleans = lambda: [  # noqa: E731
            float(row.locator("td").nth(5).get_attribute("data-value")) for row in page.locator("#runs-body tr").all()
        ]
        assert len(names()) == 5
        column.locator("button").click()
        assert cleans() == sorted(cleans(), reverse=True)
        column.locator("button").click()
        assert cleans() == sorted(cleans())
        page.locator("#runs-head th button").first.click()
        assert names() == sorted(names(), reverse=True)

        assert page.locator("#overlay .legend button").count() == 5
        page.fill("#filter", "dale")
        assert {name.partition("-")[0] for name in names()} == {"rho"}
        assert page.inner_text("#count") == "3 of 5 runs"
        assert page.locator("#overlay .legend button").count() == 3
        page.fill("#filter", "")
        page.select_option("#measure", "multiplier")
        assert page.locator("#overlay .legend button").count() == 3  # two rows have no multiplier

        assert page.locator("section.summary:visible").count() == 1
        page.locator("#runs-body tr", has_text="trades").locator("td").first.click()
        assert page.locator("section.summary:visible h2").inner_text() == "trades"
        assert not page.locator("#duals").is_visible()
        page.select_option("#focus", label="rho-0.5")
        assert page.locator("#duals").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]


HOSTILE = '"><img src=x onerror="window.hacked=1"><script>window.hacked=1<!--'


def test_hostile_names_are_text(browser, make_run, hostile, tmp_path):
    folder = make_run("a", **hostile(HOSTILE))
    other = make_run(HOSTILE.replace("/", "-"))
    path = write_report(read_runs([folder, other])[0], tmp_path / "report.html", title=HOSTILE)
    with opened(browser, path) as page:
        page.locator("#runs-body tr").nth(1).locator("td").first.click()
        page.locator("#runs-body tr").nth(0).locator("td").first.click()
        for name in ("classes", "radius", "tradeoff", "projection"):
            pointed_at(page, name, 0.5)
        assert page.evaluate("window.hacked") is None
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("script").count() == 2
        assert HOSTILE in page.inner_text("h1")
        assert HOSTILE in page.locator("#classes .legend").inner_text()


def test_print_shows_everything_on_white(browser, one):
    with opened(browser, one, scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator("#losses .tools").is_visible()
        assert page.locator("#losses svg").is_visible()
        assert len(page.pdf()) > 20_000
