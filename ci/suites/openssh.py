"""OpenSSH's tests with a server on TCP, as Debian installs them: it forks, executes itself with the connection, confines
itself, and passes the connection on from process to process."""

import os
import re
import shutil
import tempfile

from .frame import FAIL, PASS, SKIP, need

FOLDER = "/usr/lib/openssh/regress"
SECONDS = 300
# Of keys and settings only, without a server.
OFFLINE = re.compile(r"keygen|krl|sshsig|addrmatch|percent|cfginclude|sshcfgparse|cfgparse|agent-ptrace|pkcs11|moduli")


def unit(test):
    def run_it(place):
        # It writes all it makes where it lies, and has Unix sockets there, whose names may not be long.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            folder = os.path.join(scratch, "regress")
            shutil.copytree(FOLDER, folder, symlinks=True)
            names = dict.fromkeys((".OBJDIR", ".CURDIR", "BUILDDIR", "OBJ"), folder)
            names |= {"TEST_SHELL": "sh", "TEST_SSH_SSH": "ssh", "TEST_SSH_SFTPSERVER": "/usr/lib/openssh/sftp-server"}
            names |= {"TEST_SSH_IPV6": "yes", "TEST_SSH_ECC": "yes", "TEST_SSH_UNSAFE_PERMISSIONS": "1", "LTESTS": test}
            command = ["make", "t-exec", *(f"{k}={v}" for k, v in names.items())]
            status, text = place.command(command, test + ".log", SECONDS, cwd=folder)
        skipped = re.search(r"^skipped|^SKIPPED", text, re.M)
        return {test: SKIP if skipped else PASS if status == 0 and re.search(r"^ok ", text, re.M) else FAIL}

    return run_it


def prepare():
    need("openssh-tests", "openssh-server", "openssh-client", "openssl", "make")
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    with open(os.path.join(FOLDER, "Makefile"), encoding="utf-8") as f:
        tests = re.search(r"^LTESTS=((?:.*\\\n)*.*)", f.read(), re.M)[1].replace("\\\n", " ").split()
    return [(test, unit(test)) for test in tests if not OFFLINE.search(test)]
