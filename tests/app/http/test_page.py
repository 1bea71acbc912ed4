"""The page in a real browser, over the real routes and controller; see `page_fleet`."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.http import fleet_routes
from tests.app.http.page_fleet import TOKEN, Running

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_MS = 20_000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Seen:
    """A page, and what it asked for."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1440, "height": 1000}} | options)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console", lambda it: self.errors.append(it.text) if it.type in ("error", "warning") else None
        )
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def until(self, selector: str, text: str) -> None:
        """Wait until an element has this text in it."""
        playwright.expect(self.page.locator(selector)).to_contain_text(text, timeout=WAIT_MS)

    def check_accessible(self) -> None:
        found = axe.Axe().run(self.page)
        assert found.violations_count == 0, found.generate_report()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.close()


def test_page_follows_a_round_and_a_run(browser: Any, fleet: Running) -> None:
    seen = Seen(browser, fleet.address)
    seen.until("#state", "serving")
    seen.until("#members", "replica-1")
    seen.until("#no_rounds", "No round yet")
    seen.until("#back_to", "no other version in the store")
    fleet.run(fleet.fleet.publish("step 1"))
    fleet.run(fleet.fleet.trainer_step())
    seen.page.wait_for_selector("#run_Entropy canvas")
    fleet.run(fleet.fleet.step())
    seen.until("#t_version", "1")
    seen.until("#announce", "version 1")
    seen.until("#rounds tr", "committed")
    row = seen.page.locator("#rounds tr").inner_text()
    for told in ("step 1", "trainer", "270.0 MB", "300 ms", "send ", "stage "):
        assert told in row
    seen.until("#t_gap", "300 ms")
    shown_s = "(({max, min}) => max - min)(charts.get($('c_rounds')).plot.scales.x)"
    assert seen.page.evaluate(shown_s) < 60, "around the only round"
    seen.until("#members tr:first-child", "42 %")
    seen.until("#members tr:first-child", "61 %")
    seen.until("#run_of", "grpo-20261128-163000, step 1")
    seen.until("#rollouts", "v1 (17)")
    assert seen.page.locator("#rollouts .bar i").count() == 4
    charts = seen.page.locator("#run_charts")
    assert charts.locator("h3:visible").first.inner_text() == "Reward"
    assert "step s 3." in charts.inner_text(), "the job's, not the trainer's"
    assert "sums" not in charts.inner_text(), "the reward of the only source is the reward"
    seen.page.wait_for_selector("#c_update canvas")  # the tokens around the update
    for chart in ("c_tokens", "c_rounds", "run_Reward", "run_Drift_of_log_probabilities"):
        assert seen.page.locator(f"#{chart} canvas").count() == 1
    seen.page.fill("#prompt", "What is the capital of France?")
    seen.page.press("#prompt", "Enter")
    seen.until("#answer", "The capital of France is Paris")
    seen.until("#spans", "version 4")
    fleet.run(fleet.fleet.publish())
    seen.until("#rounds tr:nth-child(2)", "step 1")
    seen.until("#rounds tr:first-child", "committed")
    asked = [url.partition("?")[2] for url in seen.asked if "/fleet/rounds" in url]
    assert asked == ["after=0", "after=1"], "what it has it does not ask for again"
    assert seen.errors == []


def test_page_is_accessible_and_fits_in_both_schemes(browser: Any, fleet: Running) -> None:
    fleet.run(fleet.fleet.step())
    fleet.run(fleet.fleet.publish(pause_s=0.01))
    seen = Seen(browser, fleet.address)
    seen.until("#rounds tr", "committed")
    seen.page.wait_for_selector("#run_Reward canvas")
    for width, scheme in ((1440, "light"), (390, "dark")):
        seen.page.set_viewport_size({"width": width, "height": 900})
        seen.page.emulate_media(color_scheme=scheme)
        seen.check_accessible()
        assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_operator_pauses_resumes_and_rolls_back(browser: Any, fleet: Running) -> None:
    for is_stored in (True, False, True):
        fleet.run(fleet.fleet.publish(pause_s=0.01, is_stored=is_stored))
    seen = Seen(browser, fleet.address)
    seen.until("#back_to", "version 1")
    assert seen.page.locator("#back_to option").all_inner_texts() == ["version 1"], "2 is not in the store"
    seen.page.click("#pause")
    seen.until("#done", "Pause: done.")
    seen.until("#state", "paused")
    seen.page.click("#resume")
    seen.until("#state", "serving")
    seen.page.select_option("#back_to", "1")
    seen.page.click("#rollback button")
    seen.until("#sure_text", "Publish version 1 again, as version 4?")
    seen.page.keyboard.press("Escape")
    seen.page.click("#rollback button")
    seen.page.click("#sure button[value=yes]")
    seen.until("#done", "the fleet serves it as version 4")
    seen.until("#t_version", "4")
    seen.until("#rounds tr:first-child", "rollback to 1")
    assert seen.errors == []


def test_token_stays_in_the_tab_and_out_of_the_address(browser: Any, tmp_path: Path) -> None:
    running = Running(tmp_path, token=TOKEN)
    try:
        seen = Seen(browser, running.address)
        seen.until("#state", "locked")
        seen.check_accessible()
        for token, told in (("wrong-0123456789", "This token was refused"), (TOKEN, "")):
            seen.page.fill("#token", token)
            seen.page.keyboard.press("Enter")
            seen.until("#locked_why", told)
        seen.until("#state", "serving")
        assert not seen.page.is_visible("#locked")
        seen.page.click("#pause")
        seen.until("#state", "paused")
        assert not any(TOKEN in url for url in [*seen.asked, seen.page.url])
        assert seen.page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [
            1,
            0,
            "",
        ]
        seen.page.click("#forget")
        seen.until("#state", "locked")
        # Chromium itself writes one line for each answer with 401.
        assert [error for error in seen.errors if "401" not in error] == []
    finally:
        running.close()


def test_page_works_below_a_prefix_and_survives_a_restart(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_routes, "EVENTS_WAIT_S", 1.0)  # the fake's router outlives its controller
    running = Running(tmp_path, prefix="/rl/fleet")
    try:
        running.run(running.fleet.publish(pause_s=0.01))
        seen = Seen(browser, running.address.rstrip("/"))
        seen.until("#t_version", "1")
        seen.until("#events", "phase=committed")
        seen.context.set_offline(True)
        seen.until("#state", "no answer since")
        seen.until("#rounds", "committed")  # nothing is lost
        running.run(running.fleet.restart())
        seen.context.set_offline(False)
        seen.until("#state", "serving")
        running.run(running.fleet.publish(pause_s=0.01))
        seen.until("#t_version", "2")
        seen.until("#events", "round_id=2")
        running.run(running.fleet.replace(tmp_path / "other"))
        seen.until("#t_version", "0")
        playwright.expect(seen.page.locator("#rounds tr")).to_have_count(0, timeout=WAIT_MS)
        running.run(running.fleet.publish("of another fleet", pause_s=0.01))
        seen.until("#rounds", "of another fleet")
        seen.until("#events", "round_id=1")
        assert [error for error in seen.errors if "ERR_INTERNET_DISCONNECTED" not in error] == []
    finally:
        running.close()
