"""GLib's tests of its sockets, as Debian installs them."""

import os
import re

from .frame import FAIL, PASS, SKIP, need

FOLDER = "/usr/libexec/installed-tests/glib"
PROGRAMS = ["socket", "socket-listener", "socket-service", "socket-address", "proxy-test", "pollable", "converter-stream"]
PROGRAMS += ["gsocketclient-slow", "task", "unix-fd", "gdbus-auth", "gdbus-peer", "gdbus-server-auth", "gdbus-overflow", "mainloop"]
PROGRAMS += ["async-close-output-stream", "async-splice-output-stream", "spawn-test", "io-channel"]
SECONDS = 200


def unit(program):
    def run_it(place):
        env = {"G_TEST_SRCDIR": FOLDER, "G_TEST_BUILDDIR": FOLDER, "XDG_RUNTIME_DIR": "/tmp", "HOME": place.folder}
        status, text = place.command([os.path.join(FOLDER, program), "--tap"], program + ".log", SECONDS, cwd=FOLDER, env=env)
        results = {}
        for bad, test, skipped in re.findall(r"^(not )?ok \d+ (\S+)( # SKIP)?", text, re.M):
            results[f"{program}:{test}"] = FAIL if bad else SKIP if skipped else PASS
        results[f"{program}:all"] = PASS if status == 0 else FAIL
        return results

    return run_it


def prepare():
    need("libglib2.0-tests")
    return [(program, unit(program)) for program in PROGRAMS if os.path.exists(os.path.join(FOLDER, program))]
