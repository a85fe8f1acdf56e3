"""The ledger's status page in a real browser, against a real ledger: what a person who leaves it open gets to see."""

from __future__ import annotations

import shutil
import warnings
from base64 import b64encode
from collections.abc import Iterator

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream.wants import pack_ids

from .conftest import TOKEN, LedgerProcess, wait_until

PATIENCE = 30.0  # seconds; the page asks every two
HOSTILE = """<img src=x onerror="window.owned=1">"""


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    programs = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    program, driver = next(filter(None, programs), None), shutil.which("chromedriver")
    if not (program and driver):
        reason = "the status page is not tested: there is no chromium with chromedriver (launch/setup.sh test)"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--no-proxy-server"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


class Page:
    """The page as a person has it: what is read, what is typed, how wide the window is."""

    def __init__(self, browser: webdriver.Chrome):
        self.browser = browser

    def open(self, address: str) -> None:
        self.browser.get("about:blank")  # else a new fragment alone would not load the page again
        self.console()  # forget what was said before
        self.browser.get(address)

    def read(self, css: str) -> str:
        """What a person can see of an element; hidden is empty."""
        return self.browser.find_element(By.CSS_SELECTOR, css).text

    def run(self, script: str) -> object:
        return self.browser.execute_script(script)

    def shows(self, css: str, *texts: str) -> None:
        wait_until(lambda: all(text in self.read(css) for text in texts), PATIENCE)

    def console(self) -> list[str]:
        return [line["message"] for line in self.browser.get_log("browser")]

    def resize(self, width: int) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture
def page(browser) -> Page:
    made = Page(browser)
    made.resize(1280)
    return made


@pytest.fixture
def ledger(tmp_path, spec) -> Iterator[LedgerProcess]:
    started = LedgerProcess(tmp_path, StoreConfig("memory"), spec, max_attempts=2, window_bytes=400_000_000)
    yield started
    started.kill()


class Parties:
    """Trainer ranks and producers, as far as the ledger hears of them."""

    def __init__(self, ledger: LedgerProcess, session: str = "5001"):
        self._http = httpx.Client(
            base_url=ledger.url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=30
        )
        self.session = session

    def post(self, path: str, **body: object) -> dict:
        answer = self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def want(self, *indices: int) -> None:
        about = {"session": self.session, "features": "f", "bytes": 50_000_000, "lengths": [3]}
        ids = b64encode(pack_ids([1, 2, 3])).decode()
        self.post("/want", wants=[{**about, "index": i, "pack": f"pack{i}", "input_ids": ids} for i in indices])

    def lease(self, producer: str) -> dict:
        who = {"host": "node-b", "pid": 77, "capacity": 0, "compute_seconds": 3.0, "idle_seconds": 1.0}
        return self.post("/lease", producer=producer, features="f", wait=0.0, about=who)["lease"]

    def stored(self, producer: str) -> dict:
        lease = self.lease(producer)
        sizes = {"size": 50_000_000, "checksum": "c"}
        assert self.post("/stored", producer=producer, want=lease["want"], lease=lease["lease"], **sizes)["accepted"]
        return lease

    def failed(self, producer: str, reason: str) -> None:
        lease = self.lease(producer)
        self.post("/failed", producer=producer, want=lease["want"], lease=lease["lease"], reason=reason)

    def report(self, step: int, rank: int = 0) -> None:
        rows = [
            {
                "step": s,
                "loss": 5.0 / s,
                "expected_length": 1 + s / 100,
                "wait_seconds": 0.1,
                "seconds": 2.0,
                "tokens": 9,
            }
            for s in range(1, step + 1)
        ]
        body = {"rank": rank, "world_size": 2, "host": "node-a", "pid": 4100 + rank, "session": self.session}
        self.post("/report", **body, step=step, total_steps=200, wait_fraction=0.05, rows=rows if rank == 0 else [])


@pytest.fixture
def parties(ledger) -> Parties:
    return Parties(ledger)


def test_one_glance_and_it_keeps_itself_up_to_date(page, ledger, parties) -> None:
    parties.want(0, 1, 2, 3)
    page.open(f"{ledger.url}/#token={TOKEN}")
    page.shows("#state", "no trainer yet")
    parties.report(50)
    parties.report(50, rank=1)
    parties.stored("producer-0")
    parties.lease("producer-1")
    page.shows("#state", "running")
    page.shows("#step", "50 of 200")
    page.shows("#ranks", "0 of 2", "1 of 2", "node-a:4100", "alive", "5.0 %")
    page.shows("#producers", "producer-0", "node-b:77", "pack 1", "working", "75.0 %", "50.0 MB")
    page.shows("#states", "2 wanted", "1 leased", "1 stored")
    page.shows("#used", "100 of 400 MB")
    assert "0.10 at step 50" in page.read("#loss") and "1.50 at step 50" in page.read("#expected_length")
    assert {"0", "2", "4", "20", "40"} <= set(page.read("#loss").split("\n")), "the axes have no numbers"
    assert page.run("return document.querySelector('#loss polyline').getAttribute('points').split(' ').length") == 50
    page.run("window.same = document.querySelector('#ranks td')")
    parties.report(60)
    page.shows("#step", "60 of 200")
    page.shows("#eta", "to go")
    assert page.run("return window.same.isConnected"), "what stays is left alone: a person may be selecting it"
    assert page.console() == []
    loaded = page.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert set(loaded) == {f"{ledger.url}/status"}


def test_errors_and_packs_given_up(page, ledger, parties) -> None:
    parties.want(7)
    parties.failed("producer-0", "CUDA out of memory")
    parties.failed("producer-1", "NaN in tap 3")
    page.open(f"{ledger.url}/#token={TOKEN}")
    page.shows("#state", "1 pack given up")
    page.shows("#errors", "producer-0", "CUDA out of memory", "NaN in tap 3")
    page.shows("#failed", "pack7", "1. ", "CUDA out of memory", "2. ", "NaN in tap 3")
    page.shows("#producers", "producer-1")


def test_names_and_messages_are_text(page, ledger, parties) -> None:
    parties.want(0)
    parties.failed(HOSTILE, f"{HOSTILE}</td></table><script>window.owned=1</script>")
    page.open(f"{ledger.url}/#token={TOKEN}")
    page.shows("#producers", HOSTILE)
    page.shows("#errors", "window.owned=1</script>")
    assert page.run("return document.querySelectorAll('img').length + document.scripts.length") == 1
    assert page.run("return window.owned") is None
    assert page.console() == []


def test_no_script_but_its_own_runs(page, ledger) -> None:
    """Were markup ever let in, the policy would still keep it from running, loading and sending."""
    page.open(f"{ledger.url}/#token={TOKEN}")
    page.shows("#state", "no trainer yet")
    page.run(f"document.body.insertAdjacentHTML('beforeend', `{HOSTILE}<p style='color:red' onclick='1'>`)")
    page.run("const s = document.createElement('script'); s.textContent = 'window.owned=1'; document.body.append(s)")
    page.run("fetch('http://127.0.0.1:9/', {mode: 'no-cors'}).catch(() => {})")
    refused: list[str] = []
    wait_until(lambda: refused.extend(page.console()) or "connect-src" in "".join(refused), PATIENCE)
    assert "script-src" in "".join(refused) and "style-src" in "".join(refused)
    assert page.run("return window.owned") is None


def test_a_dead_ledger_is_said_and_its_return_noticed(page, ledger, parties) -> None:
    parties.want(0)
    parties.report(5)
    parties.stored("producer-0")
    page.open(f"{ledger.url}/#token={TOKEN}")
    page.shows("#state", "running")
    assert page.read("#banner") == ""
    ledger.kill()
    page.shows("#banner", "No answer from the ledger for 3 s; trying again.")  # the page counts
    page.shows("#state", "no answer")
    assert "5 of 200" in page.read("#step"), "what was known last stays, dimmed"
    assert page.run("return getComputedStyle(document.querySelector('main')).opacity") != "1"
    ledger.start()
    page.shows("#state", "no trainer yet")
    assert page.read("#banner") == ""
    Parties(ledger).report(6)
    page.shows("#step", "6 of 200")
    assert all("ERR_" in line for line in page.console())  # the browser itself notes each refused connection


def test_a_wrong_token_shows_nothing_and_the_right_one_can_be_typed(page, ledger, parties) -> None:
    parties.report(5)
    page.open(f"{ledger.url}/#token=wrong")
    page.shows("#banner", "The ledger refuses this token")
    assert page.read("main") == ""
    page.browser.find_element(By.ID, "token").send_keys(TOKEN, Keys.ENTER)
    page.shows("#step", "5 of 200")
    assert page.read("#banner") == "" and not page.browser.find_element(By.ID, "ask").is_displayed()
    assert page.browser.current_url == f"{ledger.url}/", "the token stays in the address"
    assert page.run("return [document.cookie, localStorage.length, sessionStorage.getItem('token')]") == ["", 0, TOKEN]
    page.browser.refresh()
    page.shows("#step", "5 of 200")


def test_without_a_token_it_is_asked_for(page, ledger) -> None:
    page.open(f"{ledger.url}/")
    page.shows("#banner", "needs the run's token")
    assert page.browser.find_element(By.ID, "token").is_displayed()
    assert page.console() == []


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_runs_off_the_side(page, ledger, parties, width: int) -> None:
    parties.want(0)
    parties.report(5)
    parties.failed("a-producer-with-a-name-" + "x" * 200, "a reason " + "y" * 400)
    page.resize(width)
    page.open(f"{ledger.url}/#token={TOKEN}")
    page.shows("#errors", "yyy")
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def test_dark_where_the_person_likes_it_dark(page, ledger) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
        page.open(f"{ledger.url}/")
        grounds.append(page.run("return getComputedStyle(document.body).backgroundColor"))
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert grounds == ["rgb(244, 246, 249)", "rgb(18, 22, 28)"]
