"""git's own tests of its network protocols, from Debian's source: `git daemon`, which executes a program with each connection
as its input and output, and Apache with libcurl's clients, plain and over TLS."""

import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, debian_source, home, need, run

SECONDS = 400
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
DAEMON = "t5570-git-daemon t5700-protocol-v1 t5702-protocol-v2 t5703-upload-pack-ref-in-want t5811-proto-disable-git t5500-fetch-pack"
HTTP = """t5539-fetch-http-shallow t5540-http-push-webdav t5541-http-push-smart t5542-push-http-shallow t5549-fetch-push-http
    t5550-http-fetch-dumb t5551-http-fetch-smart t5561-http-backend t5581-http-curl-verbose t5812-proto-disable-http"""
TLS = "t5551-http-fetch-smart t5541-http-push-smart"


def unit(build, script, tls):
    name = script + ("-tls" if tls else "")

    def run_it(place):
        folder = os.path.join(place.folder, name)
        os.makedirs(folder)
        os.chmod(folder, 0o777)
        env = {"TEST_OUTPUT_DIRECTORY": folder, "GIT_TEST_GIT_DAEMON": "true", "GIT_TEST_HTTPD": "true", "HOME": folder}
        if tls:
            env["LIB_HTTPD_SSL"] = "1"
        # Not as root, for whom Apache would be another user's.
        command = [*(AS_NOBODY if os.geteuid() == 0 else []), "sh", f"{script}.sh"]
        status, text = place.command(command, f"{name}.log", SECONDS, cwd=os.path.join(build, "t"), env=env)
        results = {f"{name}:all": PASS if status == 0 else FAIL}
        for bad, number, rest in re.findall(r"^(not )?ok (\d+)(.*)$", text, re.M):
            results[f"{name}:{number}"] = SKIP if "# skip" in rest or "# TODO" in rest else FAIL if bad else PASS
        return results

    return run_it


def prepare():
    need("gcc", "make", "perl", "apache2", "apache2-bin", "libcurl4-openssl-dev", "libexpat1-dev", "zlib1g-dev", "libpcre2-dev", "libssl-dev", "openssl")
    source = debian_source("git")
    build = os.path.join(home(), "git-build")
    if not os.path.exists(os.path.join(build, "ci-done")):
        shutil.rmtree(build, ignore_errors=True)
        shutil.copytree(source, build, symlinks=True)
        run(["make", "-j2", "CFLAGS=-O1", "NO_TCLTK=1", "NO_GETTEXT=1", "all"], log=build + ".log", cwd=build, timeout=2400)
        open(os.path.join(build, "ci-done"), "w", encoding="utf-8").close()
    units = [(script, False) for script in (DAEMON + " " + HTTP).split()] + [(script, True) for script in TLS.split()]
    return [(script + ("-tls" if tls else ""), unit(build, script, tls)) for script, tls in units]
