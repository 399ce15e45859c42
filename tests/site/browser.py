"""A page of the site in a real browser: a driver beside it fills in its form and posts what it shows."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

DRIVER = """<!doctype html><iframe id="page" src="calculator.html" width="1200" height="900"></iframe><script>
const questions = QUESTIONS;
const text = (nodes) => [...nodes].map((node) => node.textContent);
page.onload = async () => {
  const found = [];
  let failure = null;
  try {
    const view = page.contentDocument;
    for (const question of questions) {
      for (const [name, value] of Object.entries(question)) {
        const field = view.getElementById(name);
        field.value = value;
        field.dispatchEvent(new Event("input", { bubbles: true }));
      }
      found.push({
        advice: view.getElementById("advice").textContent,
        rows: [...view.querySelectorAll("#forecast tbody tr:not(.title)")].map((row) => text(row.cells)),
        apart: text(view.querySelectorAll("#forecast tbody.apart tr:not(.title) td:first-child")),
        chosen: text(view.querySelectorAll("#forecast tr.chosen td:first-child")),
        notes: text(view.querySelectorAll("#notes li")),
        command: view.getElementById("command").textContent,
        profile: await (await fetch(view.getElementById("profile").href)).json(),
        hash: page.contentWindow.location.hash,
      });
    }
  } catch (error) { failure = String(error.stack || error); }
  await fetch("answer", { method: "POST", body: JSON.stringify({ found, failure }) });
};
</script>"""


def executable() -> str | None:
    """Return the browser of this machine; None where it has none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site, the driver, and takes the answer."""

    def __init__(self, *arguments: Any, driver: str, answers: list[Any], arrived: threading.Event, **options: Any):
        self._driver, self._answers, self._arrived = driver, answers, arrived
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        if self.path != "/driver.html":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self._driver.encode())

    def do_POST(self) -> None:
        self._answers.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()
        self._arrived.set()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


def ask(site: Path, folder: Path, questions: list[dict[str, Any]], timeout_s: float = 90.0) -> list[dict[str, Any]]:
    """Return what the calculator shows after each question: values of its fields by their names.

    Args:
        site: The built site.
        folder: For the browser's own files.
    """
    answers: list[Any] = []
    arrived = threading.Event()
    driver = DRIVER.replace("QUESTIONS", json.dumps(questions))
    handler = partial(_Handler, directory=str(site), driver=driver, answers=answers, arrived=arrived)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = [
            executable(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
        ]
        words += ["--remote-debugging-port=0"]  # keeps it open: without, it ends once the page has loaded
        words += [f"--user-data-dir={folder}", f"http://127.0.0.1:{server.server_port}/driver.html"]
        process = subprocess.Popen(
            [str(word) for word in words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            in_time = arrived.wait(timeout_s)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            server.shutdown()
    assert in_time, "the browser did not answer"
    assert answers[0]["failure"] is None, answers[0]["failure"]
    found: list[dict[str, Any]] = answers[0]["found"]
    return found
