"""The pages in a real browser: charts are drawn, filters reach them, the form plans, nothing breaks the CSP."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from cost_model.presets import preset
from cost_model.rates_default import default_cost_model
from db.repositories import TokenRepository
from tests.api.conftest import Serve, Served
from tests.api.seed import HARDWARE, Seeded, seed_cost_model, seed_mixed, seed_sweep, work

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MODELS = Path(__file__).parents[2] / "examples" / "models"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH"),
]
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """A page; whatever it complains of (script errors, CSP, failed requests) fails the test.

    It is closed before its service: a request still under way would find nobody.
    """
    del served
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(20_000)
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    yield opened
    # A refused form is answered by 4xx, which the browser also writes to its console.
    context.close()
    assert [text for text in complaints if "status of 4" not in text] == []


@pytest.fixture
def seeded(served: Served) -> Seeded:
    return seed_sweep(served.database)


def charts(page: Page, panel: str) -> int:
    """Charts in a panel that have drawn something: a canvas with pixels of more than one colour."""
    expect(page.locator(f"{panel} canvas").first).to_be_visible()
    return int(
        page.evaluate(
            """(panel) => [...document.querySelectorAll(`${panel} canvas`)].filter((canvas) => {
                const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                const seen = new Set();
                for (let i = 0; i < pixels.length; i += 16) seen.add(`${pixels[i]},${pixels[i + 1]},${pixels[i + 2]}`);
                return seen.size > 8;
            }).length""",
            panel,
        )
    )


def test_the_list_leads_to_a_sweep_and_its_charts(page: Page, served: Served, seeded: Seeded) -> None:
    page.goto(served.address)
    page.get_by_role("link", name="Ring-DTP on four ranks").click()
    expect(page).to_have_url(f"{served.address}/sweeps/{seeded.sweep_id}")
    expect(page.locator("#pareto summary")).to_have_text("Table (7 rows)")
    assert charts(page, "#pareto") == 1
    expect(page.locator("#knobs section")).to_have_count(2)
    assert charts(page, "#knobs") == 2
    expect(page.locator("#trials tbody tr")).to_have_count(8)
    assert "infeasible" in str(page.locator("#pareto .chart").get_attribute("aria-label"))


def test_filters_reach_table_charts_and_address(page: Page, served: Served, seeded: Seeded) -> None:
    page.goto(f"{served.address}/sweeps/{seeded.sweep_id}")
    expect(page.locator("#pareto summary")).to_have_text("Table (7 rows)")
    page.get_by_role("checkbox", name="succeeded").check()
    expect(page.locator("#trials tbody tr")).to_have_count(5)
    expect(page.locator("#pareto summary")).to_have_text("Table (5 rows)")
    page.get_by_label("ring mode", exact=True).select_option("weights")
    expect(page.locator("#trials tbody tr")).to_have_count(2)
    expect(page.locator("#pareto summary")).to_have_text("Table (2 rows)")
    assert "state=succeeded" in page.url
    assert "knob.ring_mode=weights" in page.url
    page.goto(page.url)
    expect(page.locator("#trials tbody tr")).to_have_count(2)
    expect(page.locator("#pareto summary")).to_have_text("Table (2 rows)")


def rows_of(page: Page, panel: str) -> list[list[str]]:
    """The figures under a chart."""
    page.locator(f"{panel} summary").click()
    lines = page.locator(f"{panel} details tbody tr")
    return [line.locator("td").all_inner_texts() for line in lines.all()]


def test_every_chart_of_a_sweep_follows_the_filters(page: Page, served: Served, seeded: Seeded) -> None:
    page.goto(f"{served.address}/sweeps/{seeded.sweep_id}")
    panels = {"#pareto": (7, 5), "#lines": (7, 5), "#workers": (6, 5), "#importance": (2, 2)}
    for panel, (everything, _) in panels.items():
        expect(page.locator(f"{panel} summary")).to_have_text(f"Table ({everything} rows)")
        assert charts(page, panel) == 1
    page.get_by_role("checkbox", name="succeeded").check()
    for panel, (_, kept) in panels.items():
        expect(page.locator(f"{panel} summary")).to_have_text(f"Table ({kept} rows)")
    page.get_by_label("strip rows", exact=True).select_option("2048")
    expect(page.locator("#workers")).to_contain_text("Nobody has worked")
    expect(page.locator("#lines")).to_contain_text("No finished trial")
    expect(page.locator("#importance")).to_contain_text("Too few measured trials")


def test_importance_is_the_share_between_values_less_chance(page: Page, served: Served) -> None:
    page.goto(f"{served.address}/sweeps/{seed_sweep(served.database).sweep_id}")
    found = page.evaluate(
        """async () => {
            const { explained } = await import("/static/js/sweep_knobs.js");
            const trial = (a, b, time) => ({ config: { a, b }, time });
            const grid = [];
            for (const a of [1, 2, 3, 4]) for (const b of ["x", "y"]) for (let n = 0; n < 3; n += 1)
                grid.push(trial(a, b, Math.exp(a + (n - 1) * 1e-3)));
            const time = (one) => one.time;
            const wide = Array.from({ length: 40 }, (_, n) => trial(n, "x", 1 + ((n * 7919) % 13)));
            return [
                explained(grid, "a", [1, 2, 3, 4], time), explained(grid, "b", ["x", "y"], time),
                explained(grid.slice(0, 1), "a", [1], time),
                explained(grid.map((one) => ({ ...one, time: 2 })), "a", [1, 2, 3, 4], time),
                explained(wide, "a", wide.map((one) => one.config.a), time),
            ];
        }"""
    )
    assert found[0] == pytest.approx(1.0, abs=1e-4)
    assert found[1] == 0
    assert found[2] is None
    assert found[3] == 0
    assert found[4] < 0.3  # forty values of one trial each explain nothing


def test_two_sweeps_are_compared_in_one_chart(page: Page, served: Served, seeded: Seeded) -> None:
    other = seed_sweep(served.database, name="Another day").sweep_id
    page.goto(f"{served.address}/sweeps/{seeded.sweep_id}")
    page.get_by_label("Compare with").select_option(label="Another day")
    expect(page.locator("#pareto summary")).to_have_text("Table (12 rows)")
    expect(page).to_have_url(re.compile(f"compare={other}"))
    page.goto(page.url)
    expect(page.locator("#pareto summary")).to_have_text("Table (12 rows)")
    page.get_by_label("ring mode", exact=True).select_option("weights")
    expect(page.locator("#pareto summary")).to_have_text("Table (5 rows)")
    assert {row[-1] for row in rows_of(page, "#pareto")} == {"this", "Another day"}


def test_pruned_points_and_where_ranks_stand_are_shown(page: Page, served: Served) -> None:
    sweep_id = seed_mixed(served.database)
    page.goto(f"{served.address}/sweeps/{sweep_id}")
    expect(page.locator("#summary")).to_contain_text("4 × cpu on 2 nodes")
    expect(page.locator("#pareto summary")).to_have_text("Table (3 rows)")
    assert [row[1] for row in rows_of(page, "#pareto")] == ["succeeded", "pruned", "infeasible"]
    assert "1 pruned, 1 infeasible" in str(page.locator("#pareto .chart").get_attribute("aria-label"))
    page.goto(served.address)
    expect(page.locator("#sweeps")).to_contain_text("4 × cpu on 2 nodes")
    page.goto(f"{served.address}/sweeps/{sweep_id}")
    page.get_by_role("link", name="Trial 0", exact=True).click()
    expect(page.locator("#samples")).to_contain_text("40 % of the repeats stand in a slow mode at 70.0 ms")


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_page_is_wider_than_its_window(browser: Browser, served: Served, width: int) -> None:
    seeded = seed_sweep(served.database, name="A name that goes on and on " * 5)
    model = {**default_cost_model(preset("hgx-h200", 1)).to_json(), "hardware_id": HARDWARE}
    seed_cost_model(served.database, model)
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    for path in (
        "/",
        f"/sweeps/{seeded.sweep_id}",
        f"/trials/{seeded.trial_ids[0]}",
        "/plan",
        "/plans",
        "/cost-models",
    ):
        page.goto(served.address + path)
        page.wait_for_load_state("networkidle")
        beyond = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert beyond == 0, path
    context.close()


def test_the_csv_of_a_chart_holds_its_rows(page: Page, served: Served, seeded: Seeded) -> None:
    page.goto(f"{served.address}/sweeps/{seeded.sweep_id}")
    expect(page.locator("#pareto summary")).to_have_text("Table (7 rows)")
    with page.expect_download() as download:
        page.locator("#pareto a.csv").click()
    lines = Path(str(download.value.path())).read_text().splitlines()
    assert lines[0].startswith("number,state,config,latency_s")
    assert len(lines) == 1 + 7


def test_a_running_sweep_fills_while_it_is_watched(page: Page, served: Served) -> None:
    sweep_id = seed_sweep(served.database, finish=False).sweep_id
    page.goto(f"{served.address}/sweeps/{sweep_id}")
    expect(page.locator("#live")).to_have_attribute("data-state", "open")
    work(served.database, sweep_id, most=2)
    expect(page.locator("#trials .badge.succeeded")).to_have_count(2)
    expect(page.locator("#pareto summary")).to_have_text("Table (4 rows)")
    work(served.database, sweep_id)
    expect(page.locator("#summary .badge").first).to_have_text("succeeded")
    expect(page.locator("#live")).to_be_hidden()


def test_a_sweep_is_cancelled_from_its_page(page: Page, served: Served) -> None:
    sweep_id = seed_sweep(served.database, finish=False).sweep_id
    page.goto(f"{served.address}/sweeps/{sweep_id}")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#summary .badge").first).to_have_text("cancelled")


def test_a_browser_fetches_again_only_what_has_changed(page: Page, served: Served) -> None:
    sweep_id = seed_sweep(served.database).sweep_id
    for _ in range(2):
        page.goto(f"{served.address}/sweeps/{sweep_id}")
        page.wait_for_load_state("networkidle")
    told = served.client.get("/metrics").text
    assert 'route="/v1/sweeps/{sweep_id}",status="304"' in told
    assert 'route="/v1/sweeps/{sweep_id}",status="412"' not in told


def test_a_trial_stacks_its_bound_against_the_peak(page: Page, served: Served, seeded: Seeded) -> None:
    page.goto(f"{served.address}/trials/{seeded.trial_ids[1]}")
    expect(page.locator("#terms summary")).to_have_text("Table (5 rows)")
    assert charts(page, "#terms") == 1
    assert charts(page, "#samples") == 1
    page.goto(f"{served.address}/trials/{seeded.trial_ids[6]}")
    expect(page.locator("pre")).to_contain_text("boom <b>")


def test_the_form_plans_a_pasted_config_and_exports_it(page: Page, served: Served) -> None:
    page.goto(f"{served.address}/plan")
    page.get_by_label("Hugging Face config.json").fill((MODELS / "gpt-oss-20b.json").read_text())
    page.get_by_role("button", name="Plan").click()
    expect(page.locator(".verdict .badge")).to_have_text("fits")
    expect(page.locator("#memory summary")).to_contain_text("rows")
    assert charts(page, "#memory") == 1
    assert charts(page, "#step") == 1
    assert page.locator("#alternatives tbody tr").count() > 1
    with page.expect_download() as download:
        page.locator("#export").click()
    exported = json.loads(Path(str(download.value.path())).read_text())
    assert exported["launch"]["sequence_degree"] >= 1
    page.get_by_role("link", name="Plans", exact=True).first.click()
    expect(page.locator("tbody tr")).to_have_count(1)


def test_the_form_says_what_is_wrong(page: Page, served: Served) -> None:
    page.goto(f"{served.address}/plan")
    page.get_by_label("Hugging Face config.json").fill("{not json")
    page.get_by_role("button", name="Plan").click()
    expect(page.get_by_role("alert")).to_contain_text("valid JSON")
    expect(page.locator("#config")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Hugging Face config.json").fill((MODELS / "gpt-oss-20b.json").read_text())
    page.get_by_label("Global batch (tokens)").fill("131073")
    page.get_by_role("button", name="Plan").click()
    expect(page.get_by_role("alert")).to_contain_text("global_batch_tokens")
    expect(page.locator("#global_batch_tokens")).to_have_attribute("aria-invalid", "true")


def test_a_cost_model_shows_parity(page: Page, served: Served, seeded: Seeded) -> None:
    model = {**default_cost_model(preset("hgx-h200", 1)).to_json(), "hardware_id": HARDWARE}
    seed_cost_model(served.database, model)
    page.goto(f"{served.address}/cost-models")
    expect(page.locator("#parity summary")).to_have_text("Table (10 rows)")
    assert charts(page, "#parity") == 1
    assert charts(page, "#errors") == 1
    assert charts(page, "#residuals") == 1
    assert [row[:3] for row in rows_of(page, "#residuals")] == [
        ["ring dtp, backward", "4 ranks", "5"],
        ["ring dtp, forward", "4 ranks", "5"],
    ]
    expect(page.locator("#coverage")).to_contain_text("every prediction says so")


def test_a_fitted_cost_model_shows_what_it_has_seen(page: Page, served: Served) -> None:
    model = {**default_cost_model(preset("hgx-h200", 1)).to_json(), "hardware_id": HARDWARE}
    model["coverage"] = {"ring_dtp": {"tokens_per_rank": [1024, 65536], "ranks": [2, 8]}}
    seed_cost_model(served.database, model)
    page.goto(f"{served.address}/cost-models")
    expect(page.locator("#coverage tbody tr")).to_have_count(2)
    expect(page.locator("#coverage")).to_contain_text("65,536")
    expect(page.locator("#residuals")).to_contain_text("No samples of this hardware")


def test_signing_in_opens_the_page_that_was_asked_for(page: Page, serve: Serve) -> None:
    with serve(tokens_required=True) as served:
        sweep_id = seed_sweep(served.database).sweep_id
        with served.database.session() as session:
            _, text = TokenRepository(session).create("browser", ["read", "write"])
        page.goto(f"{served.address}/sweeps/{sweep_id}")
        page.get_by_label("Token").fill(text)
        page.get_by_role("button", name="Sign in").click()
        expect(page).to_have_url(f"{served.address}/sweeps/{sweep_id}")
        expect(page.locator("#pareto summary")).to_have_text("Table (7 rows)")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Token")).to_be_visible()


def test_the_theme_is_kept_and_keys_reach_the_content(page: Page, served: Served) -> None:
    page.goto(served.address)
    button = page.get_by_role("button", name="Change colour theme")
    button.click()
    button.click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.goto(f"{served.address}/plan")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
