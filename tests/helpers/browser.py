"""A headless Chromium driven over WebDriver with nothing but the standard library."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
MISSING = (
    None
    if CHROMIUM and DRIVER
    else "needs chromium and chromedriver (Debian: chromium, chromium-driver)"
)


class Browser:
    """One window; a context manager, so that it is always closed."""

    def __init__(self, width=1200, height=900):
        self.size = f"--window-size={width},{height}"
        self.width, self.height = width, height

    def __enter__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.base = f"http://127.0.0.1:{port}"
        for _ in range(200):
            try:
                self._ask("GET", "/status")
                break
            except OSError:
                time.sleep(0.05)
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            self.size,
        ]
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        except BaseException:
            self.__exit__()
            raise
        self.base += f"/session/{session['sessionId']}"
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=self.width,
            height=self.height,
            deviceScaleFactor=1,
            mobile=False,
        )
        return self

    def __exit__(self, *_):
        try:
            self._ask("DELETE", "")
        except OSError:
            pass
        finally:
            self.driver.terminate()
            self.driver.wait()

    def _ask(self, method, path, body=None):
        data = None if method in ("GET", "DELETE") else json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self.base + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def devtools(self, command, **params):
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def scheme(self, name):
        """What the system prefers: light or dark."""
        self.devtools(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}]
        )

    def open(self, path):
        self._ask("POST", "/url", {"url": Path(path).resolve().as_uri()})
        self.wait("return document.body.dataset.ready === 'yes'")

    def run(self, script, *args):
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def wait(self, script, seconds=60):
        """Wait until a script says yes."""
        for _ in range(int(seconds / 0.05)):
            if self.run(script):
                return
            time.sleep(0.05)
        raise AssertionError(f"never came true: {script}; {self.complaints()}")

    def press(self, *keys):
        """Press keys one after another, on whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask(
            "POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]}
        )

    def complaints(self):
        """What the console has been told since the last time: errors and warnings."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def screenshot(self):
        return base64.b64decode(self._ask("GET", "/screenshot"))
