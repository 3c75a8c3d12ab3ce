"""PHP's own tests of its sockets and streams, from Debian's source, with Debian's interpreter."""

import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, debian_source, need

FOLDERS = ["ext/sockets/tests", "ext/standard/tests/streams", "ext/standard/tests/http", "ext/openssl/tests", "ext/standard/tests/network"]
FOLDERS += ["sapi/cli/tests", "ext/curl/tests", "ext/ftp/tests", "ext/soap/tests/bugs"]
SECONDS = 500


def unit(source, folder):
    def run_it(place):
        env = {"NO_INTERACTION": "1", "SKIP_ONLINE_TESTS": "1", "TEST_PHP_EXECUTABLE": "/usr/bin/php", "SKIP_IO_CAPTURE_TESTS": "1"}
        command = ["php", "run-tests.php", "-q", "-P", "--no-color", "--set-timeout", "60", folder]
        log = folder.replace("/", "-") + ".log"
        # It writes beside the tests: a copy for each variant.
        copy = os.path.join(place.folder, "php", log + ".d")
        shutil.copytree(os.path.join(source, folder), os.path.join(copy, folder))
        shutil.copy(os.path.join(source, "run-tests.php"), copy)
        _, text = place.command(command, log, SECONDS, cwd=copy, env=env)
        results = {}
        for result, test in re.findall(r"(?:^|[\r\]])(PASS|FAIL|SKIP|XFAIL|BORK|WARN) [^\r\n]*?\[(\S+\.phpt)\]", text, re.M):
            results[test] = {"PASS": PASS, "FAIL": FAIL}.get(result, SKIP)
        if not results:
            results[folder + ":all"] = FAIL
        return results

    return run_it


def prepare():
    need("php-cli", "php-curl", "php-xml", "php-soap")
    source = debian_source("php8.2")
    return [(folder, unit(source, folder)) for folder in FOLDERS if os.path.isdir(os.path.join(source, folder))]
