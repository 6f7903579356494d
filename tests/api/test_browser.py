"""The pages in a real browser: charts are drawn, filters reach them, the form plans, nothing breaks the CSP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from cost_model.presets import preset
from cost_model.rates_default import default_cost_model
from db.repositories import TokenRepository
from tests.api.conftest import Serve, Served
from tests.api.seed import HARDWARE, Seeded, seed_cost_model, seed_sweep, work

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
def page(browser: Browser) -> Iterator[Page]:
    """A page; whatever it complains of (script errors, CSP, failed requests) fails the test."""
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
    page.get_by_label("ring mode").select_option("weights")
    expect(page.locator("#trials tbody tr")).to_have_count(2)
    expect(page.locator("#pareto summary")).to_have_text("Table (2 rows)")
    assert "state=succeeded" in page.url
    assert "knob.ring_mode=weights" in page.url
    page.goto(page.url)
    expect(page.locator("#trials tbody tr")).to_have_count(2)
    expect(page.locator("#pareto summary")).to_have_text("Table (2 rows)")


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
