"""The page of `collect watch` in a real browser: it updates without a reload, contacts only its server, and is readable."""

import contextlib

import pytest
import support_browser
import support_collect as support
import support_watch
from support_watch import running, served, step

from shardlab.workspace.workspace import Workspace

pytestmark = support_browser.needed
STEPS_DRAWN = """(run) => [...document.querySelectorAll('.run')].find((one) => one.textContent.includes(run))
  ?.querySelector('.plot')?.data?.[0]?.x?.length ?? 0"""
LONG_MS = 60_000


@pytest.fixture(scope="module")
def browser():
    with support_browser.browser() as started:
        yield started


@contextlib.contextmanager
def shown(browser, url, width=support_browser.WIDTH, **options):
    """Yields (the page after it has shown its first data, the addresses that the page requested, the warnings and errors of the
    page)."""
    context = browser.new_context(viewport={"width": width, "height": support_browser.HEIGHT}, **options)
    page, requests, complaints = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    try:
        page.goto(url)
        page.wait_for_selector("#link.live", timeout=LONG_MS)
        yield page, requests, complaints
    finally:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_live_page_shows_queue_curves_and_telemetry_of_its_own_server(browser, tmp_path, scheme):
    workspace = support.matrix(tmp_path / "a <b> & 'c'")
    folder = running(workspace, gpu=True)
    with served(workspace) as url, shown(browser, url, color_scheme=scheme) as (page, requests, complaints):
        page.wait_for_selector(".plot svg.main-svg", timeout=LONG_MS)
        titles = page.locator(".run h4").all_inner_texts()
        assert titles[:3] == ["Loss", "Step time (ms)", "GPU busy (%)"]
        assert "Processors busy (%)" in titles
        assert page.locator(".run h3").all_inner_texts() == [folder.run_id]
        assert page.locator("#queue tbody tr").count() == len({run.removesuffix("-a2") for run in workspace.list_run_ids()})
        assert page.locator("#queue tbody tr", has_text="20 of 100").count() == 1
        assert "runs ended" in page.locator("#overview").inner_text()
        assert page.evaluate(support_browser.FAINT) == []
        assert page.evaluate(support_browser.OVERFLOW) <= support_browser.WIDTH
        assert {request for request in requests if not request.startswith(url)} <= {"data:,"}
        assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [support_browser.PHONE, 1440])
def test_axe_finds_no_serious_violation_in_the_live_page(browser, tmp_path, width, scheme):
    workspace = support.matrix(tmp_path)
    running(workspace, gpu=True)
    with served(workspace) as url, shown(browser, url, width, color_scheme=scheme) as (page, _, _):
        page.wait_for_selector(".plot svg.main-svg", timeout=LONG_MS)
        assert support_browser.find_serious_violations(page) == []


def test_the_live_page_can_be_read_on_a_phone(browser, tmp_path):
    workspace = support.matrix(tmp_path)
    running(workspace)
    with served(workspace) as url, shown(browser, url, support_browser.PHONE) as (page, _, _):
        page.wait_for_selector(".plot svg.main-svg", timeout=LONG_MS)
        assert page.evaluate(support_browser.OVERFLOW) <= support_browser.PHONE


def test_the_live_page_follows_a_run_to_its_end_without_a_reload(browser, tmp_path):
    workspace = Workspace(tmp_path)
    with served(workspace) as url, shown(browser, url) as (page, requests, complaints):
        page.wait_for_function("() => document.querySelector('#queue').textContent.includes('No runs yet')")
        waits = support.prepare(workspace, support.cell())
        page.wait_for_function("(run) => document.querySelector('#queue').textContent.includes(run)", arg=waits.run_id)
        folder = running(workspace, done=5)
        drawn = f"(run) => ({STEPS_DRAWN})(run) === %d"
        page.wait_for_function(drawn % 5, arg=folder.run_id, timeout=LONG_MS)
        for number in (6, 7):
            step(folder, number, 1.25)
        page.wait_for_function(drawn % 7, arg=folder.run_id, timeout=LONG_MS)
        page.wait_for_function("() => document.querySelector('.run .now').textContent === '1.25'", timeout=LONG_MS)
        support.event(folder, "exited", 9, code=1)
        page.wait_for_function("() => document.querySelector('.run').textContent.includes('exit code 1')", timeout=LONG_MS)
        assert page.locator("#at-work-title").inner_text() == "Last at work"
        assert [request for request in requests if request == url] == [url]
        assert complaints == []


def test_hostile_texts_stay_texts(browser, tmp_path):
    workspace = Workspace(tmp_path)
    folder = running(workspace)
    folder.samples_file(support.HOST).rename(folder.samples_file("<img src=x onerror=alert(3)>"))
    folder.environment_file(support.HOST).rename(folder.environment_file("<script>alert(4)<"))
    support.failed(workspace, support.cell(), 1, support_watch.HOSTILE)
    with served(workspace) as url, shown(browser, url) as (page, _, complaints):
        page.wait_for_selector(".plot svg.main-svg", timeout=LONG_MS)
        assert "<img src=x onerror=alert(1)>" in page.locator("#queue").inner_text()
        assert page.locator("main :is(img, script)").count() == 0
        assert complaints == []


def test_the_live_page_reports_that_its_server_ended(browser, tmp_path):
    running(Workspace(tmp_path))
    with contextlib.ExitStack() as server:
        url = server.enter_context(served(Workspace(tmp_path)))
        with shown(browser, url) as (page, _, _):
            server.close()
            page.wait_for_selector("#link.ended", timeout=LONG_MS)
            assert page.locator("#link").inner_text().startswith("no answer from collect watch; this is of ")
            assert page.locator(".run").count() == 1


def test_the_policy_refuses_foreign_requests_and_scripts_in_the_page(browser, tmp_path):
    """The page's Content-Security-Policy blocks requests to other hosts, and scripts that are inserted into the page."""
    running(Workspace(tmp_path))
    with served(Workspace(tmp_path)) as url, shown(browser, url) as (page, _, complaints):
        page.evaluate("() => { new Image().src = 'https://example.invalid/x.png'; }")
        page.evaluate("() => fetch('https://example.invalid/').catch(() => 0)")
        page.evaluate("() => { document.querySelector('#queue').innerHTML = '<img src=x onerror=alert(1)>'; }")
        page.wait_for_timeout(200)
        assert sum("Content Security Policy" in complaint for complaint in complaints) >= 3
        assert not [complaint for complaint in complaints if complaint == "1"]


def test_the_report_opens_from_the_page(browser, tmp_path):
    workspace = support.matrix(tmp_path)
    with served(workspace) as url, shown(browser, url) as (page, requests, complaints):
        page.get_by_role("link", name="Report, drawn now").click()
        page.wait_for_selector(".plot svg.main-svg", timeout=LONG_MS)
        page.evaluate("() => document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        page.wait_for_function(support_browser.DRAWN)  # a figure is drawn when a reader unfolds its part
        assert page.evaluate(support_browser.UNDRAWN) == []
        assert {request for request in requests if not request.startswith(url)} <= {"data:,"}
        assert complaints == []
        page.locator("#runs a.id").first.click()
        page.get_by_role("link", name="run.json").click()
        assert '"run_id"' in page.content()
