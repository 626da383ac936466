"""The dashboard in Chromium: it shows what happens, acts when told to, and survives what an operator's day brings."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, expect

from inferry.ingress.dashboard.static import PREFIX
from support.browser import PATIENCE_MS, Viewer, chromium
from support.scripted_worker import ScriptedWorker
from support.serving import Serving, post
from support.tenant_gateway import ADMIN_KEY, TenantGateway

expect.set_options(timeout=PATIENCE_MS)

CANARY = "canary-0a93bd"
HOSTILE_RUN = "<img/src=x/onerror=window.taken=1>"
HOSTILE_TENANT = '"><script>window.taken=1</script>'
HOSTILE_MODEL = "<b>m</b>'; rm -rf $HOME #"

Open = Callable[..., Viewer]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages, closes them at the end, and finds that their consoles were silent."""
    opened: list[Viewer] = []

    def open_page(url: str, **context: Any) -> Viewer:
        viewer = Viewer(browser, url, **context)
        opened.append(viewer)
        return viewer

    yield open_page
    for viewer in opened:
        viewer.close()


def call(gateway: Serving, run: str, *, tokens: int = 8, **headers: str) -> tuple[int, Any]:
    body = {"model": "tiny", "prompt": [7] * 8, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    status, _, answer = post(gateway.url, "/v1/completions", body, {"x-inferry-run-id": run, **headers})
    return status, answer


def chat(gateway: Serving, content: str = "hi", model: str = "m", **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    return post(gateway.url, "/v1/chat/completions", body, named)[0]


def scripted(directory: Path, *, port: int = 0, config: Any = None, **script: Any) -> Serving:
    return Serving(directory, lambda: ([ScriptedWorker(**script)], {}), config, port=port)


# -- what it shows ---------------------------------------------------------------------------------------------------


def test_a_new_gateway_says_how_to_send_the_first_call(tmp_path: Path, open_page: Open) -> None:
    with scripted(tmp_path, models=(HOSTILE_MODEL,)) as gateway:
        viewer = open_page(gateway.url)
        viewer.until_live()
        expect(viewer.page.locator("#status")).to_have_text("Ready")
        command = viewer.text(".first-call code")
        assert f"curl -N {gateway.url}/v1/chat/completions" in command
        assert r"<b>m</b>'\''; rm" in command, "a shell takes a model's name as text"
        expect(viewer.page.locator("#alert-rows")).to_have_text("All quiet: no alert is pending or firing.")
        expect(viewer.page.locator(".lane .chip")).to_have_text(["P0", "P1", "P2"])
        expect(viewer.page.locator(".worker h3")).to_have_text("scripted")
        viewer.close()


def test_the_page_follows_a_burst_of_real_calls(real: Serving, open_page: Open) -> None:
    viewer = open_page(real.url)
    viewer.until_live()
    before = viewer.text(".run-table, .first-call")
    assert "burst-run" not in before
    stop = threading.Event()

    def agent(number: int) -> None:
        while not stop.is_set():
            assert call(real, "burst-run", tokens=64, **{"x-inferry-step-id": f"step-{number}"})[0] == 200

    with ThreadPoolExecutor(6) as agents:
        calls = [agents.submit(agent, number) for number in range(6)]
        try:
            page = viewer.page
            row = page.locator(".run", has_text="burst-run")
            expect(row).to_have_attribute("data-status", "active")
            expect(row.locator(".flight")).to_contain_text("decode")
            viewer.until("Number(document.querySelector('.tile[data-key=calls] .figure').textContent) > 0")
            viewer.until("Number(document.querySelector('.tile[data-key=flight] .figure').textContent) > 0")
            viewer.until("parseInt(document.querySelector('.worker-facts .row span:last-child').textContent) > 0")
            viewer.until("document.querySelector('.kv-text strong').textContent !== '0%'")
            expect(page.locator(".lane[data-lane=P1] .attained .figure")).to_contain_text("%")
            viewer.until(
                "document.querySelector('.lane[data-lane=P1] .target-chart .line').getAttribute('d').length > 20"
            )
        finally:
            stop.set()
        for one in calls:
            one.result(timeout=PATIENCE_MS)
    expect(row).to_have_attribute("data-status", "idle")
    expect(page.locator("#cost-rows .cost")).not_to_have_count(0)


def test_a_late_p95_is_red_where_the_lane_misses_its_target_only(tmp_path: Path, open_page: Open) -> None:
    shown = """async ([prefix, attainment]) => {
        const { LanesPanel } = await import(`${prefix}lanes.js`);
        const parent = document.createElement("div");
        const known = { ttft_p95_ms: 90, ttft_target_ms: 500, itl_p95_ms: 61, itl_target_ms: 30, attainment };
        const none = { queued: 0, calls_per_s: 1, queue_p95_ms: 1, queue_p50_ms: 1 };
        new LanesPanel(parent).live({ at: 1, lanes: [{ lane: "P0", ...known, ...none }] });
        const fact = parent.querySelectorAll(".fact")[3];
        return [fact.getAttribute("data-over"), fact.querySelector("dt").title.includes("TTFT + i")];
    }"""
    with scripted(tmp_path) as gateway:
        viewer = open_page(gateway.url)
        viewer.until_live()
        assert viewer.page.evaluate(shown, [PREFIX, 1.0]) == [None, True]
        assert viewer.page.evaluate(shown, [PREFIX, 0.9]) == ["true", True]
        viewer.close()


def test_a_run_opens_with_its_timeline(real: Serving, open_page: Open) -> None:
    for step in ("plan", "search", "answer"):
        assert call(real, "timeline-run", tokens=16, **{"x-inferry-step-id": step})[0] == 200
    use = {"a<i>b": {"calls": 2, "seconds": 1.5}, "write": {"calls": 1, "seconds": 4}}
    assert post(real.url, "/v1/runs/timeline-run/finish", {"tools": use})[0] == 200
    viewer = open_page(real.url)
    page = viewer.page
    page.locator(".run-link", has_text="timeline-run").click()
    expect(page.locator(".run-facts")).to_contain_text("write 4.0 s (1), a<i>b 1.5 s (2)")
    expect(page.locator(".run-facts div", has_text="Cost")).to_have_text("Cost\N{EN DASH}")
    expect(page.locator(".worker-facts dt").last).to_have_text("Busy, 1 min")
    expect(page.locator(".step-name")).to_have_text(["plan", "search", "answer"])
    expect(page.locator(".step .k-decode")).to_have_count(3)
    expect(page.locator(".step").first.locator(".k-tool")).to_have_count(2)
    page.locator(".step").first.click()
    expect(page.locator(".step-detail").first).to_contain_text("Worker")
    expect(page.locator(".step-detail").first).to_contain_text("local")
    expect(page.locator(".step-detail").first.locator(".whole")).to_contain_text("Decision")
    expect(page.locator(".step-detail").first.locator(".whole dd")).to_contain_text("Sent to local")
    with page.expect_download() as download:
        page.get_by_role("link", name="Perfetto trace").click()
    assert download.value.suggested_filename == "timeline-run.perfetto.json"
    trace = msgspec.json.decode(download.value.path().read_bytes())
    assert {one["args"]["name"] for one in trace["traceEvents"] if one["ph"] == "M"} >= {"plan", "search", "answer"}
    page.keyboard.press("Escape")
    expect(page.locator("#run-dialog")).not_to_be_visible()


def test_a_firing_and_a_pending_alert_are_shown(tmp_path: Path, open_page: Open) -> None:
    # Both are true from the second sample on, without any load.
    rules = {
        "InferryEventLoopLag": {"threshold": -1, "for_s": 0},
        "InferryQueueNearlyFull": {"threshold": -1, "for_s": 3600},
    }
    with scripted(tmp_path, config={"alerts": {"rules": rules}}) as gateway:
        for _ in range(2):
            gateway.run(gateway.service.observation._sample())
        viewer = open_page(gateway.url)
        viewer.until_live()
        page = viewer.page
        firing, pending = (page.locator(f".alert[data-state={state}]") for state in ("firing", "pending"))
        expect(firing.locator("strong")).to_have_text("InferryEventLoopLag")
        expect(firing).to_contain_text("firing ·")
        expect(firing.locator("p").first).to_contain_text("late (p99)")
        expect(pending.locator("strong").first).to_have_text("InferryQueueNearlyFull")
        expect(pending.first).to_contain_text("pending ·")
        expect(page.locator("#alert-count")).to_have_text("1 firing")
        expect(page.locator("#alerts")).to_have_attribute("data-firing", "true")
        viewer.close()


def test_names_from_outside_are_text(tmp_path: Path, open_page: Open) -> None:
    with scripted(tmp_path, models=(HOSTILE_MODEL,), name="<i>w</i>") as gateway:
        assert (
            chat(gateway, CANARY, HOSTILE_MODEL, x_inferry_run_id=HOSTILE_RUN, x_inferry_tenant=HOSTILE_TENANT) == 200
        )
        viewer = open_page(gateway.url)
        viewer.until_live()
        page = viewer.page
        expect(page.locator(".run-link")).to_have_text(HOSTILE_RUN)
        expect(page.locator(".run .tenant")).to_have_text(HOSTILE_TENANT)
        expect(page.locator(".worker h3")).to_have_text("<i>w</i>")
        expect(page.locator(".models")).to_have_text(HOSTILE_MODEL)
        expect(page.locator(".cost .tenant")).to_have_text(HOSTILE_TENANT)
        page.locator(".run-link").click()
        expect(page.locator("#run-title")).to_have_text(HOSTILE_RUN)
        expect(page.locator(".step-name")).not_to_have_count(0)
        page.locator(".step").first.click()
        expect(page.locator(".step-detail").first).to_contain_text(HOSTILE_MODEL)
        assert page.evaluate("window.taken") is None
        assert page.locator("main img, main script, dialog img, dialog script, .worker h3 i").count() == 0
        assert CANARY not in page.content()
        viewer.close()


# -- what it does ----------------------------------------------------------------------------------------------------


def test_the_cancel_button_ends_a_run_at_the_engine(real: Serving, open_page: Open) -> None:
    with ThreadPoolExecutor(1) as agents:
        running: Future[Any] = agents.submit(call, real, "doomed-run", tokens=16_000)
        viewer = open_page(real.url)
        page = viewer.page
        row = page.locator(".run", has_text="doomed-run")
        row.get_by_role("button", name="Cancel run doomed-run").click()
        expect(page.locator("#confirm-title")).to_have_text("Cancel run doomed-run?")
        page.locator("#confirm-no").click()
        expect(row).to_have_attribute("data-status", "active")
        row.get_by_role("button", name="Cancel run doomed-run").click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#toast")).to_contain_text("Run cancelled")
        expect(row).to_have_attribute("data-status", "cancelled")
        expect(row.get_by_role("button", name="Cancel run doomed-run")).to_be_hidden()
        status, answer = running.result(timeout=PATIENCE_MS)
    assert (status, answer["error"]["code"]) == (409, "run_cancelled")


def test_a_worker_is_drained_and_readmitted(tmp_path: Path, open_page: Open) -> None:
    with scripted(tmp_path) as gateway:
        viewer = open_page(gateway.url)
        page = viewer.page
        for button, phase in (("Drain", "draining"), ("Readmit", "ready")):
            page.get_by_role("button", name=f"{button} worker scripted").click()
            page.locator("#confirm-yes").click()
            expect(page.locator(".worker")).to_have_attribute("data-phase", phase)
        viewer.close()


def test_the_page_survives_a_restart_of_the_gateway_and_says_so_meanwhile(tmp_path: Path, browser: Browser) -> None:
    with scripted(tmp_path) as gateway:
        port = gateway.port
        viewer = Viewer(browser, gateway.url)
        viewer.until_live()
        assert chat(gateway, x_inferry_run_id="before") == 200
        expect(viewer.page.locator(".run-link")).to_have_text("before")
    connection = viewer.page.locator("#connection")
    expect(connection).to_have_attribute("data-state", "lost")
    expect(connection).to_contain_text("Reconnecting")
    expect(viewer.page.locator(".run-link")).to_have_text("before")
    with scripted(tmp_path, port=port) as gateway:
        viewer.until_live()
        expect(connection).to_have_text("Live")
        assert chat(gateway, x_inferry_run_id="after") == 200
        expect(viewer.page.locator(".run-link", has_text="after")).to_be_visible()
        viewer.context.close()
    # The browser itself reports requests that found no gateway; nothing else went wrong.
    assert [error for error in viewer.errors if "net::ERR_" not in error and "503" not in error] == []


# -- for every reader ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A gateway with something in every panel: long names, a run in flight, runs that have ended."""
    config = {"prices": {"m": {"input": 1.0, "output": 2.0}}}
    made: list[ScriptedWorker] = []

    def workers() -> tuple[list[ScriptedWorker], dict[str, Any]]:
        made.append(ScriptedWorker(name="a-worker-with-a-rather-long-name-" + "x" * 30, models=("m", "n" * 60)))
        return [*made, ScriptedWorker(name="second")], {}

    with Serving(tmp_path_factory.mktemp("busy"), workers, config) as gateway, ThreadPoolExecutor(3) as agents:
        for number in range(12):
            run, tenant = f"run-{number}-{'y' * 20 * number}"[:250], f"tenant-{'z' * 8 * number}"
            assert chat(gateway, x_inferry_run_id=run, x_inferry_tenant=tenant) == 200
        gateway._loop.call_soon_threadsafe(made[0].gate.clear)
        held = [agents.submit(chat, gateway, x_inferry_run_id="in-flight-" + "q" * 80) for _ in range(3)]
        yield gateway
        gateway._loop.call_soon_threadsafe(made[0].gate.set)
        assert [one.result(timeout=PATIENCE_MS) for one in held] == [200] * 3


THEMES = pytest.mark.parametrize("scheme", ["light", "dark"])
WIDTHS = pytest.mark.parametrize("width", [390, 820, 1440])


@THEMES
@WIDTHS
def test_nothing_overlaps_and_nothing_scrolls_sideways(busy: Serving, open_page: Open, width: int, scheme: Any) -> None:
    viewer = open_page(busy.url, viewport={"width": width, "height": 844}, color_scheme=scheme)
    viewer.until_live()
    expect(viewer.page.locator(".run[data-status=active]")).not_to_have_count(0)
    expect(viewer.page.locator(".cost")).not_to_have_count(0)
    assert viewer.page.evaluate("document.documentElement.scrollWidth") <= width
    assert viewer.overlapping_texts() == []
    assert viewer.faint_texts() == []
    viewer.page.locator(".run-link").first.click()
    expect(viewer.page.locator(".step-name")).not_to_have_count(0)
    assert viewer.page.evaluate("document.querySelector('.drawer-body').scrollWidth") <= width
    assert viewer.faint_texts() == []


def test_the_theme_is_the_systems_until_one_is_chosen_and_stays_chosen(busy: Serving, open_page: Open) -> None:
    viewer = open_page(busy.url, color_scheme="dark")
    page = viewer.page
    viewer.until_live()
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(colour)
    assert dark != light
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.evaluate(colour) == dark
    page.reload()
    viewer.until_live()
    assert page.evaluate(colour) == dark
    page.locator("#theme").click()
    assert page.evaluate(colour) == light


def test_everything_is_reachable_by_keyboard(busy: Serving, open_page: Open) -> None:
    viewer = open_page(busy.url)
    viewer.until_live()
    page = viewer.page
    expect(page.locator(".run[data-status=active]")).not_to_have_count(0)
    wanted = page.locator("button:visible, a:visible").count()
    seen: set[str] = set()
    name = """(() => {
      const one = document.activeElement;
      const outline = getComputedStyle(one).outlineStyle;
      return [one.tagName, one.id, one.ariaLabel, one.textContent, one.className, outline].join(" ");
    })()"""
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        seen.add(page.evaluate(name))
    assert any("BUTTON theme" in one for one in seen)
    assert any("Drain worker second" in one for one in seen)
    assert any("Cancel run in-flight" in one for one in seen)
    assert all(one.rsplit(" ", 1)[1] != "none" for one in seen if one.startswith(("BUTTON", "A ")))
    page.locator(".run-link").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#run-dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#run-dialog")).to_be_hidden()
    assert page.evaluate("document.activeElement.className") == "run-link"


# -- sign-in ---------------------------------------------------------------------------------------------------------


def test_with_an_admin_key_the_page_asks_for_it_and_actions_need_the_token(tmp_path: Path, browser: Browser) -> None:
    with TenantGateway(tmp_path, lambda: ([ScriptedWorker()], {})) as gateway:
        viewer = Viewer(browser, gateway.url)
        page = viewer.page
        expect(page.locator("#gate-title")).to_have_text("Sign in")
        expect(page.locator("#main")).to_be_hidden()
        assert viewer.errors == []
        page.locator("#key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#gate-error")).to_have_text("wrong admin key.")
        page.locator("#key").fill(ADMIN_KEY)
        page.keyboard.press("Enter")
        viewer.until_live()
        (cookie,) = viewer.context.cookies(gateway.url + "/admin/")
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert page.evaluate("document.cookie") == ""
        assert ADMIN_KEY not in page.content() + page.evaluate(
            "JSON.stringify(localStorage) + JSON.stringify(sessionStorage)"
        )
        refused = "fetch('/admin/workers/scripted/drain', {method: 'POST'}).then((answer) => answer.status)"
        assert page.evaluate(refused) == 403
        page.get_by_role("button", name="Drain worker scripted").click()
        page.locator("#confirm-yes").click()
        expect(page.locator(".worker")).to_have_attribute("data-phase", "draining")
        page.locator("#sign-out").click()
        expect(page.locator("#gate-title")).to_be_visible()
        expect(page.locator("#main")).to_be_hidden()
        assert viewer.context.cookies(gateway.url + "/admin/") == []
        viewer.context.close()
    assert [error for error in viewer.errors if "403" not in error] == []
