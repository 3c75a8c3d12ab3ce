"""OpenLDAP's tests, from Debian's source: a server of threads around one epoll set, its command line clients by the dozen, servers
that replicate to each other and proxies that pool their connections to others."""

import glob
import os
import shutil

from .frame import FAIL, PASS, SKIP, debian_source, need, run

SECONDS = 280
# Its server does not end, and takes a whole processor, also without the library.
NOT = "test079-proxy-timeout"
# They wait for servers to have started and to have replicated, with these many seconds at a time.
SLEEPS = {"SLEEP1": "5", "SLEEP2": "10"}
OPTIONS = ["--enable-debug", "--enable-overlays", "--disable-autoca", "--disable-otp", "--without-tls", "--with-cyrus-sasl"]
OPTIONS += ["--disable-perl", "--disable-sql", "--disable-wt", "--enable-meta", "--enable-ldap", "--enable-asyncmeta"]
OPTIONS += ["--enable-relay", "--enable-dnssrv", "--enable-null", "--disable-shared"]


def unit(source, test):
    def run_it(place):
        work = os.path.join(place.folder, test)
        folder = os.path.join(work, "tests")
        os.makedirs(folder)
        for name in os.listdir(source):
            if name != "tests":
                os.symlink(os.path.join(source, name), os.path.join(work, name))
        for name in "data", "progs", "run", "scripts":
            os.symlink(os.path.join(source, "tests", name), os.path.join(folder, name))
        status, text = place.command(["./run", "-b", "mdb", test], f"{test}.log", SECONDS, cwd=folder, env=SLEEPS)
        if status == 0:
            # Their data would be gigabytes.
            shutil.rmtree(os.path.join(folder, "testrun"), ignore_errors=True)
            return {test: PASS if "Test succeeded" in text else SKIP}
        return {test: FAIL}

    return run_it


def prepare():
    need("gcc", "make", "groff-base", "libsasl2-dev", "libltdl-dev")
    source = debian_source("openldap")
    done = os.path.join(source, "ci-done")
    if not os.path.exists(done):
        # Debian keeps those that are RFCs' text elsewhere.
        schemas = os.path.join(source, "servers", "slapd", "schema")
        for path in glob.glob(os.path.join(source, "debian", "schema", "*.*")):
            shutil.copy(path, schemas)
        log = os.path.join(source, "build.log")
        run(["./configure", *OPTIONS], log=log, cwd=source)
        run(["make", "depend"], log=log, cwd=source)
        run(["make", "-j2"], log=log, cwd=source, timeout=1200)
        # The tests' own programs are built by a run of none.
        run(["make", "-C", "tests/progs"], log=log, cwd=source)
        open(done, "w", encoding="utf-8").close()
    tests = sorted(os.path.basename(path) for path in glob.glob(os.path.join(source, "tests", "scripts", "test[0-9]*-*")))
    return [(test, unit(source, test)) for test in tests if not test.endswith(".py") and test != NOT]
