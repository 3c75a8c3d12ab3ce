"""curl's own tests, from Debian's source: its client and the servers of the tests, for each of its protocols."""

import getpass
import os
import re

from .frame import FAIL, PASS, SKIP, debian_source, home, need, run

# As many numbers of tests as a unit runs.
AT_ONCE = 100
SECONDS = 900

# What is changed in the tests, each a file, what stands there and what shall.
MENDED = [
    # Their SSH server is for everybody but root, who runs them here.
    ("sshserver.pl", "$username eq 'root'", "0"),
    ("sshserver.pl", "'PermitRootLogin no'", "'PermitRootLogin yes'"),
    # Servers write their ports after their process ids, which is what is waited for.
    (
        "runtests.pl",
        " = pidfromfile($portfile);",
        " = do { my $n = 0; select(undef, undef, undef, 0.05) until (-s $portfile || $n++ > 100); pidfromfile($portfile) };",
    ),
]


def unit(build, source, first, last):
    def run_it(place):
        # It writes where it is, and finds what was built beside that.
        work = os.path.join(place.folder, f"part-{first}", "tests")
        os.makedirs(work)
        for name in ("src", "lib", "curl-config", "Makefile"):
            os.symlink(os.path.join(build, name), os.path.join(work, "..", name))
        for name in ("server", "libtest", "unit", "configurehelp.pm", "Makefile"):
            os.symlink(os.path.join(build, "tests", name), os.path.join(work, name))
        tests = os.path.join(source, "tests")
        os.symlink(os.path.join(tests, "certs"), os.path.join(work, "certs"))
        command = ["perl", "-I" + tests, os.path.join(tests, "runtests.pl"), "-n", "-a", "-k", "-am", "!TFTP", str(first), "to", str(last)]
        env = {"srcdir": tests, "HOME": place.folder, "USER": getpass.getuser()}
        _, text = place.command(command, f"{first}.log", SECONDS, cwd=work, env=env)
        results = {}
        for result, test in re.findall(r"^(PASS|FAIL|SKIP): (\d+)", text, re.M):
            results[test] = {"PASS": PASS, "FAIL": FAIL}.get(result, SKIP)
        return results or {f"{first}:all": FAIL}

    return run_it


def prepare():
    need("gcc", "make", "perl", "libssl-dev", "libnghttp2-dev", "libssh2-1-dev", "nghttp2-proxy", "openssh-server", "stunnel4", "zlib1g-dev")
    source = debian_source("curl")
    for name, old, new in MENDED:
        path = os.path.join(source, "tests", name)
        with open(path, encoding="utf-8") as f:
            text = f.read()
        if old in text:
            with open(path, "w", encoding="utf-8") as f:
                f.write(text.replace(old, new))
    build = os.path.join(home(), "curl-ssh-build")
    if not os.path.exists(os.path.join(build, "ci-done")):
        os.makedirs(build, exist_ok=True)
        log = build + ".log"
        options = ["--with-openssl", "--with-libssh2", "--without-libpsl", "--disable-ldap", "--disable-shared", "--enable-debug"]
        run([os.path.join(source, "configure"), *options], log=log, cwd=build)
        # The build looks at the style of the source too, which Debian's changes do not keep.
        unlooked = ["make", "-j2", "CHECKSRC=true || "]
        run(unlooked, log=log, cwd=build, timeout=1200)
        run([*unlooked, "-C", "tests"], log=log, cwd=build, timeout=1200)
        open(os.path.join(build, "ci-done"), "w", encoding="utf-8").close()
    numbers = (re.fullmatch(r"test(\d+)", name) for name in os.listdir(os.path.join(source, "tests", "data")))
    hundreds = {(int(n[1]) - 1) // AT_ONCE for n in numbers if n}
    return [(f"from {i * AT_ONCE + 1}", unit(build, source, i * AT_ONCE + 1, (i + 1) * AT_ONCE)) for i in sorted(hundreds)]
