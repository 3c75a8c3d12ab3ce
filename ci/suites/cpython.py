"""CPython's own tests of what stands on sockets."""

import importlib.util
import os
import shutil
import subprocess
import sys

from .frame import FAIL, SKIP, Unavailable, clean_env, junit, need

# The longest first: two run at a time.
MODULES = """test_asyncio test_socket test_ssl test_selectors test_ftplib test_imaplib test_poplib test_select
    test_socketserver test_asynchat test_asyncore test_httpservers test_httplib test_urllib2_localnet test_xmlrpc
    test_docxmlrpc test_epoll test_poll test_telnetlib test_smtplib test_wsgiref test_eintr""".split()
# What stands on pipes and pairs of Unix sockets: for `--pairs`.
PROCESSES = """test_multiprocessing_fork test_multiprocessing_spawn test_multiprocessing_forkserver test_concurrent_futures
    test_subprocess test_os test_posix test_signal test_threadsignals test_io test_fileio test_file_eintr test_fork1 test_wait3
    test_wait4 test_popen test_cmd_line test_script_helper test_faulthandler test_multiprocessing_main_handling test_mailbox
    test_pty test_tty test_pipes test_fcntl test_ioctl test_runpy test_logging test_queue test_thread test_largefile
    test_support test_regrtest test_tempfile test_shutil test_cgi test_netrc test_univnewlines test_exceptions test_sys
    test_atexit test_gc test_threading test_asyncgen test_pdb test_builtin test_uuid test_webbrowser""".split()
SECONDS = 400
OPTIONS = {
    # Would talk to the hypervisor.
    "test_socket": ["-i", "*VSOCK*"],
    # Loopback only, but the whole module asks for it.
    "test_socketserver": ["-u", "network"],
}


def has_tests(python):
    # (Debian's has the package, without the tests, until libpython3-testsuite is there.)
    return exists(python, "test_socket")


def python():
    """A Python that brings its tests."""
    for candidate in (sys.executable, "/usr/bin/python3"):
        if shutil.which(candidate) and has_tests(candidate):
            return candidate
    need("python3", "libpython3-testsuite")
    if not has_tests("/usr/bin/python3"):
        raise Unavailable("no Python with its tests")
    return "/usr/bin/python3"


def unit(exe, module):
    def run(place):
        xml_file = os.path.join(place.folder, module + ".xml")
        scratch = os.path.join(place.folder, module)
        os.makedirs(scratch)
        command = [exe, "-m", "test", "-v", "--timeout", str(SECONDS - 20), "--junit-xml", xml_file]
        command += [*OPTIONS.get(module, []), module]
        status, _ = place.command(command, module + ".log", SECONDS, cwd=scratch)
        results = junit(xml_file, lambda case: f"{module}:{case.get('name').split(' ')[0]}")
        # 2: tests failed, 3: the environment was changed, 4: nothing was run.
        if status not in (0, 2, 3, 4) or not results:
            results[f"{module}:all"] = SKIP if status in (0, 4) else FAIL
        return results

    return run


def prepare():
    return units(MODULES)


def prepare_processes():
    return units(PROCESSES)


def units(modules):
    exe = python()
    found = exe != sys.executable or importlib.util.find_spec("test")
    if not found:
        raise Unavailable("no test package")
    return [(m, unit(exe, m)) for m in modules if exists(exe, m)]


def exists(exe, module):
    code = f"import sys, importlib.util as u; sys.exit(u.find_spec('test.{module}') is None)"
    return subprocess.run([exe, "-c", code], env=clean_env(), check=False).returncode == 0
