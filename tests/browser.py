"""A real headless Chromium, driven over its own protocol; tests of the page skip where there is
none."""

import json
import shutil
import subprocess
import tempfile
import time
from base64 import b64decode
from contextlib import contextmanager
from pathlib import Path

from websockets.sync.client import connect

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WHY_NOT = "no Chromium on the PATH (Debian: apt-get install chromium)"
_PATIENCE_S = 60.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--disable-background-timer-throttling", "--remote-debugging-port=0", "--hide-scrollbars",
    "--force-color-profile=srgb",
)  # fmt: skip


class Tab:
    """One page in the browser. faults: what its console, its network and its policies complained
    of; requests: every address that it asked for, with the time of the browser's clock."""

    def __init__(self, socket):
        self._socket, self._last = socket, 0
        self.faults, self.requests = [], []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Answer of one call; what happens meanwhile is noted."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=_PATIENCE_S))
            if message.get("id") == self._last:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, message):
        params = message.get("params", {})
        match message["method"]:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.faults.append(details.get("exception", details).get("description", details))
            case "Log.entryAdded" if params["entry"]["source"] == "security":
                self.faults.append(params["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.faults.append(f"dialog: {params['message']}")
                self.call("Page.handleJavaScriptDialog", accept=False)
            case "Network.requestWillBeSent":
                self.requests.append(params["request"])

    def open(self, url, width=1280, height=900, **media):
        """Load a page in a window of this size; `prefers_color_scheme="dark"` and the like."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        features = [{"name": k.replace("_", "-"), "value": v} for k, v in media.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script):
        """Value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True,
                           awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script, patience_s=_PATIENCE_S):
        """Value of an expression as soon as it is true."""
        deadline = time.monotonic() + patience_s
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (script, self.text(), self.faults)
            time.sleep(0.05)
        return value

    def text(self, selector="body"):
        """What a person reads there."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def type(self, selector, text):
        """Type into a field as a person would, by the keyboard."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key):
        """Press and release one key."""
        codes = {"Enter": (13, "\r"), "Tab": (9, "\t"), " ": (32, " ")}
        code, text = codes[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code,
                      text=text if kind == "keyDown" else "")  # fmt: skip

    def close(self):
        """Close the page; the browser stays."""
        self.call("Page.close")

    def picture(self, path):
        """Save the visible page as PNG."""
        Path(path).write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser():
    """A function that opens tabs, in a browser that ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        sockets = []

        def connected(address):
            # Events queue up while a test looks away, in whatever number.
            sockets.append(
                connect(address, max_size=None, max_queue=None, ping_interval=None, legacy=True)
            )
            return sockets[-1]

        try:
            told, deadline = Path(folder) / "DevToolsActivePort", time.monotonic() + _PATIENCE_S
            while not (told.exists() and told.read_text().count("\n") >= 1):
                assert process.poll() is None and time.monotonic() < deadline, "Chromium is silent"
                time.sleep(0.05)
            port, path = told.read_text().split("\n")[:2]
            root = connected(f"ws://127.0.0.1:{port}{path}")

            def tab():
                root.send(json.dumps({
                    "id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}
                }))  # fmt: skip
                while "result" not in (answer := json.loads(root.recv(timeout=_PATIENCE_S))):
                    pass
                target = answer["result"]["targetId"]
                address = f"ws://127.0.0.1:{port}/devtools/page/{target}"
                return Tab(connected(address))

            yield tab
        finally:
            for socket in reversed(sockets):
                socket.close()
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
