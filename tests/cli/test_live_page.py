"""`art-nb view --live`: a page that needs the key, follows the run, and fits a phone."""

import signal
import subprocess
import sys
import time

import httpx
import pytest
from support.remote_parts import MAIN
from support.ui import HOSTILE
from support.view_parts import games

import art_nb as art
from art_nb.cli.live_page import LivePageServer


@pytest.fixture
def store(tmp_path):
    store = art.RunStore(tmp_path / ".art" / "project" / "models" / "run")
    store.write_model({"name": "run", "base_model": "smollm2-135m"})
    store.write_groups("train", 1, [games(1, 4)])
    store.append_history({"step": 1, "train/reward": 0.25})
    return store


def test_only_the_key_opens_it_and_nothing_can_be_changed(store):
    with LivePageServer(store.path) as server, httpx.Client(base_url=server.url.partition("?")[0]) as client:
        for request in ({}, {"params": {"key": "wrong"}}, {"cookies": {"art_nb_view": "wrong"}}):
            reply = client.get("/", **request)
            assert reply.status_code == 401 and "set-cookie" not in reply.headers and "0.25" not in reply.text
        first = client.get("/", params={"key": server.key})
        assert first.status_code == 303 and first.headers["location"] == "/"
        assert "HttpOnly" in first.headers["set-cookie"]
        page = client.get("/")  # with the cookie
        assert page.status_code == 200 and "0.25" in page.text and server.key not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for method in ("POST", "PUT", "DELETE"):
            assert client.request(method, "/").status_code == 405


def test_two_pages_on_one_machine_and_a_damaged_file(store):
    pages = [LivePageServer(store.path) for _ in range(2)]
    with pages[0] as first, pages[1] as second, httpx.Client(follow_redirects=True) as browser:
        for server in (first, second):
            assert browser.get(server.url).status_code == 200
        for server in (first, second):
            reply = browser.get(server.url.partition("?")[0])  # the cookies of both pages are kept
            assert reply.status_code == 200 and reply.headers["refresh"] == "60"
        assert browser.get(first.url.partition("?")[0] + "favicon.ico").status_code == 404
        (store.path / "trajectories" / "train" / "0001.parquet").write_bytes(b"PAR1")
        time.sleep(2.1)  # a page is kept for two seconds
        reply = browser.get(first.url.partition("?")[0])
        assert reply.status_code == 200 and reply.headers["refresh"] and "0.25" in reply.text


def test_hostile_texts_stay_texts(store):
    group = games(2, 1)
    group.trajectories[0].messages_and_choices.append({"role": "user", "content": "\n".join(HOSTILE)})
    store.write_groups("train", 2, [group])
    store.append_history({"step": 2, "train/reward": 0.5})
    with LivePageServer(store.path) as server, httpx.Client(follow_redirects=True) as client:
        text = client.get(server.url).text
        assert "<script" not in text and "&lt;script" in text


def test_the_command_follows_the_run_until_ctrl_c(store):
    command = [sys.executable, "-c", MAIN, "view", str(store.path.parents[2]), "--live"]  # .art: it has only this run
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split(": ", 1)[1].strip()
        with httpx.Client(follow_redirects=True) as client:
            assert "0.25" in client.get(url).text
            store.append_history({"step": 2, "train/reward": 0.875})
            end = time.monotonic() + 120
            while "0.875" not in client.get(url).text:
                assert time.monotonic() < end
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and out.splitlines()[-1] == "Closed." and not error


def test_it_fits_a_phone(store, browser):
    with LivePageServer(store.path) as server:
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.goto(server.url)
        assert page.url.endswith("/")  # without the key
        assert page.locator("h1").inner_text() == "run"
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        page.close()
