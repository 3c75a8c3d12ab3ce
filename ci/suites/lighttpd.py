"""lighttpd's own tests, from Debian's source: requests of a Perl client, also through FastCGI and SCGI programs and a proxy."""

import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, debian_source, home, need, run

TESTS = ["request.t", "core-condition.t", "mod-fastcgi.t", "mod-scgi.t"]
SECONDS = 300
# How it waits.
HANDLERS = ["linux-sysepoll", "poll", "select"]


def unit(build, test, handler):
    def run_it(place):
        name = f"{handler}:{test}"
        # The tests write beside themselves, and find the server beside that.
        work = os.path.join(place.folder, name.replace(":", "-"))
        tests = os.path.join(work, "tests")
        shutil.copytree(os.path.join(build, "tests"), tests, symlinks=True)
        os.symlink(os.path.join(build, "src"), os.path.join(work, "src"))
        # The programs behind the server get a few variables only.
        ours = [v for v in place.env if v.startswith("RINGSOCK_")] + ["LD_PRELOAD", "WARM_TABLE"]
        more = "".join(f'"{v}", ' for v in ours)
        for conf in os.listdir(tests):
            if conf.endswith(".conf") and conf != "var-include-sub.conf":
                path = os.path.join(tests, conf)
                with open(path, encoding="utf-8") as f:
                    text = f.read()
                with open(path, "w", encoding="utf-8") as f:
                    f.write(text.replace('"bin-copy-environment" => ( ', f'"bin-copy-environment" => ( {more}'))
                    f.write(f'\nserver.event-handler = "{handler}"\n')
        env = {"srcdir": tests, "top_builddir": work, "SHELL": "/bin/sh", "USER": "nobody", "PERL_HASH_SEED": "0"}
        command = ["sh", "-c", f"sh ./prepare.sh && exec perl ./{test}"]
        status, text = place.command(command, f"{handler}-{test}.log", SECONDS, cwd=tests, env=env)
        results = {}
        for bad, test_name, skipped in re.findall(r"^(not )?ok (\d+ - .*?)( # (?:skip|SKIP).*)?$", text, re.M):
            results[f"{name}:{test_name}"] = SKIP if skipped else FAIL if bad else PASS
        results[f"{name}:all"] = PASS if status == 0 else FAIL
        return results

    return run_it


def prepare():
    need("gcc", "make", "perl", "libpcre2-dev", "zlib1g-dev", "libssl-dev")
    source = debian_source("lighttpd")
    build = os.path.join(home(), "lighttpd-build")
    if not os.path.exists(os.path.join(build, "ci-done")):
        shutil.rmtree(build, ignore_errors=True)
        shutil.copytree(source, build)
        # The programs behind the server wait for 10 ms, and no longer, for what comes; chaos holds calls up for 15.
        for name in ("fcgi-responder.c", "scgi-responder.c"):
            path = os.path.join(build, "tests", name)
            with open(path, encoding="utf-8") as f:
                text = f.read()
            with open(path, "w", encoding="utf-8") as f:
                f.write(text.replace("poll(&pfd, 1, 10)", "poll(&pfd, 1, 2000)"))
        log = build + ".log"
        run(["sh", "./configure", "--with-openssl", "--without-bzip2"], log=log, cwd=build)
        run(["make", "-j2"], log=log, cwd=build, timeout=1200)
        run(["make", "-C", "tests", "fcgi-responder", "scgi-responder"], log=log, cwd=build)
        open(os.path.join(build, "ci-done"), "w", encoding="utf-8").close()
    return [(f"{handler} {test}", unit(build, test, handler)) for handler in HANDLERS for test in TESTS]
