"""Erlang's own tests of its TCP sockets, from Debian's source, with Debian's runtime (RabbitMQ's): the driver `inet_drv`, and
the newer `socket`."""

import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, debian_source, home, need, run

SUITES = ["gen_tcp_api_SUITE", "gen_tcp_echo_SUITE", "gen_tcp_misc_SUITE", "inet_sockopt_SUITE", "socket_SUITE"]
SECONDS = 1500
# It starts runtimes of its own that open all the sockets they can, and takes minutes.
NOT = {"gen_tcp_misc_SUITE": ["iter_max_socks"]}
# Each suite asks for this hook, which prepares the sources of the whole runtime for tests.
HOOK = """-module(ts_install_cth).
-export([id/1, init/2]).
id(_) -> ?MODULE.
init(_, _) -> {ok, none}.
"""


def unit(build, suite):
    def run_it(place):
        logs = os.path.join(place.folder, suite)
        os.makedirs(logs)
        spec = os.path.join(place.folder, suite + ".spec")
        with open(spec, "w", encoding="utf-8") as f:
            f.write(f'{{logdir, "{logs}"}}.\n{{suites, "{build}", [{suite}]}}.\n')
            for case in NOT.get(suite, []):
                f.write(f'{{skip_cases, "{build}", {suite}, [{case}], "opens all the sockets there are"}}.\n')
        command = ["ct_run", "-spec", spec, "-noshell", "-pa", build, "-no_auto_compile", "-erl_args", "-sname", "ct"]
        # Any of its threads may go on with what another has dialled.
        place.command(command, suite + ".log", SECONDS, cwd=build, env={"HOME": place.folder, "WARM_BOTH": "no"})
        results = {}
        for folder, _, files in os.walk(logs):
            if "suite.log" not in files:
                continue
            with open(os.path.join(folder, "suite.log"), encoding="utf-8", errors="replace") as f:
                text = f.read()
            for case, result in re.findall(r"^=case +(\S+)\n(?:(?!=case).*\n)*?=result +(\S+)", text, re.M):
                kind = PASS if result.startswith("ok") else SKIP if "skipped" in result else FAIL
                # The same case runs in several groups.
                n = sum(k.startswith(case + "#") for k in results)
                results[f"{case}#{n}"] = kind
        if not results:
            results[f"{suite}:all"] = FAIL
        return results

    return run_it


def prepare():
    need("erlang-base", "erlang-common-test", "erlang-dev", "erlang-ssl", "erlang-crypto", "erlang-public-key", "erlang-inets")
    source = os.path.join(debian_source("erlang"), "lib", "kernel", "test")
    build = os.path.join(home(), "erlang-build")
    if not os.path.exists(os.path.join(build, "ci-done")):
        shutil.rmtree(build, ignore_errors=True)
        shutil.copytree(source, build)
        names = [n for n in sorted(os.listdir(build)) if n.endswith(".erl")]
        wanted = [n for n in names if n[:-4] in SUITES or n.startswith(("kernel_test_", "socket_test_"))]
        with open(os.path.join(build, "ts_install_cth.erl"), "w", encoding="utf-8") as f:
            f.write(HOOK)
        wanted.append("ts_install_cth.erl")
        run(["erlc", "+nowarn_deprecated_function", *wanted], log=build + ".log", cwd=build, timeout=600)
        open(os.path.join(build, "ci-done"), "w", encoding="utf-8").close()
    return [(suite, unit(build, suite)) for suite in SUITES]
