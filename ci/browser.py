"""A headless browser, driven over a pipe by its own debugging protocol.
Standard library only."""

import json
import os
import select
import shutil
import signal
import subprocess
import time

from preload_lib import clean_env

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find():
    """A browser's path, or None."""
    return next((b for b in map(shutil.which, NAMES) if b), None)


class Page:
    """One page in a browser of its own; as a context manager."""

    def __init__(self, browser, folder, limit=120):
        self.until = time.monotonic() + limit
        # The browser reads commands from its fd 3 and writes answers to its fd 4.
        to_read, self.to = os.pipe()
        self.come, come_write = os.pipe()
        # fmt: off
        cmd = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank",
        ]
        # fmt: on

        def place():
            # Twice, because one of them may have the other's number.
            a, b = os.dup(to_read), os.dup(come_write)
            high = [os.dup2(a, 100), os.dup2(b, 101)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        with open(os.path.join(os.path.dirname(folder), "browser.log"), "wb") as log:
            # fmt: off
            self.proc = subprocess.Popen(
                cmd, env=clean_env({"HOME": folder}), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=place, pass_fds=(3, 4), start_new_session=True,
            )
            # fmt: on
        os.close(to_read)
        os.close(come_write)
        self.rest, self.last, self.session = b"", 0, None
        # What the page's console and the browser's own log say of it.
        self.said = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(domain + ".enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for fd in (self.to, self.come):
            os.close(fd)
        try:
            self.proc.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.proc.pid, signal.SIGKILL)
            self.proc.wait(10)

    def next(self):
        """The next message, or an AssertionError when there is none in time."""
        while b"\0" not in self.rest:
            left = self.until - time.monotonic()
            ready = select.select([self.come], [], [], max(0.0, left))[0] if left > 0 else []
            got = os.read(self.come, 1 << 20) if ready else b""
            assert got, "the browser says nothing more"
            self.rest += got
        line, self.rest = self.rest.split(b"\0", 1)
        m = json.loads(line)
        p = m.get("params", {})
        if m.get("method") == "Runtime.consoleAPICalled":
            self.said.append(f"{p['type']}: {[x.get('value', x.get('description')) for x in p['args']]}")
        elif m.get("method") == "Runtime.exceptionThrown":
            self.said.append(f"exception: {p['exceptionDetails'].get('text')}")
        elif m.get("method") == "Log.entryAdded":
            self.said.append(f"{p['entry']['level']}: {p['entry']['text']}")
        return m

    def ask(self, method, **params):
        """A command's result."""
        self.last += 1
        m = {"id": self.last, "method": method, "params": params}
        if self.session:
            m["sessionId"] = self.session
        data = json.dumps(m).encode() + b"\0"
        while data:
            data = data[os.write(self.to, data) :]
        while True:
            m = self.next()
            if m.get("id") == self.last:
                assert "error" not in m, (method, m["error"])
                return m["result"]

    def open(self, url):
        """Goes there, until all is loaded."""
        r = self.ask("Page.navigate", url=url)
        assert "errorText" not in r, (url, r["errorText"])
        while self.next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression):
        """What a JavaScript expression yields in the page."""
        r = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in r, r["exceptionDetails"]
        return r["result"].get("value")
