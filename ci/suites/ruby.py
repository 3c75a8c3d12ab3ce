"""Ruby's specification of its sockets, from Debian's source package: the small print of each call, and IO's. For `--pairs`
also that of processes, signals and threads, and Ruby's own tests of these."""

import glob
import os
import re

from .frame import FAIL, PASS, SKIP, debian_source, need

PARTS = ["library/socket", "library/net", "core/io", "core/kernel"]
SECONDS = 150
# What stands on pipes and pairs of Unix sockets: parts of the specification, and files of Ruby's own tests.
PROCESSES = """core/io core/process core/signal core/thread core/kernel core/argf core/mutex core/queue core/exception
    library/open3 library/socket library/expect library/drb library/timeout""".split()
# Of these, some examples hang without pipes proper.
ONE_BY_ONE = ["core/io", "core/process", "core/signal", "core/thread"]
TESTS = """ruby/test_io ruby/test_io_m17n ruby/test_io_buffer ruby/test_pipe ruby/test_process ruby/test_signal
    ruby/test_thread ruby/test_thread_queue ruby/test_readpartial ruby/test_system ruby/test_sleep ruby/test_argf
    ruby/test_beginendblock ruby/test_rubyoptions ruby/test_file ruby/test_fiber fiber/test_* io/nonblock/test_* io/wait/test_*
    socket/test_* test_open3 test_timeout test_tempfile test_pty test_expect drb/test_*""".split()
# They start as many processes as the machine allows, dial 8,192 times with nobody there to warm up with, or have children
# whose words run into the test's name; TCP passes no fds.
NEVER = """test_aspawn_too_long_path test_spawn_too_long_path test_connect_timeout test_initialize_connect_timeout
    test_rlimit_nofile test_system_sigpipe test_fd_passing test_fd_passing_class_mode test_fd_passing_n test_fd_passing_n2
    test_fd_passing_race_condition test_sendmsg test_sendmsg_ancillarydata_int test_sendmsg_ancillarydata_unix_rights
    test_recvmsg""".split()
FILE_SECONDS = 40
TEST_SECONDS = 240


def unit(ruby, source, part, one_by_one=False):
    """One part of the specification; where something in it may hang, each of its files by itself."""

    def run_one(place, what):
        name = what.replace("/", "-")
        xml_file = os.path.join(place.folder, name + ".xml")
        scratch = os.path.join(place.folder, name)
        os.makedirs(scratch)
        command = [ruby, "-Ispec/mspec/lib", "spec/mspec/bin/mspec-run", "-f", "j", "-o", xml_file, f"spec/ruby/{what}"]
        seconds = FILE_SECONDS if one_by_one else SECONDS
        status, _ = place.command(command, name + ".log", seconds, cwd=source, env={"SPEC_TEMP_DIR": scratch})
        results = {}
        # What it writes is not always XML.
        if status in (0, 1) and os.path.exists(xml_file):
            with open(xml_file, encoding="utf-8", errors="replace") as f:
                cases = re.findall(r'<testcase .*?name="(.*?)" time=.*?>(.*?)</testcase>', f.read(), re.DOTALL)
            for name, told in cases:
                # One name may stand for several examples.
                good = not re.search("<(failure|error)", told) and results.get(f"{part}:{name}") != FAIL
                results[f"{part}:{name}"] = PASS if good else FAIL
        if not results and (not one_by_one or status not in (0, 1)):
            results[f"{what}:all"] = FAIL
        return results

    def run(place):
        if not one_by_one:
            return run_one(place, part)
        results = {}
        for f in sorted(glob.glob(os.path.join(source, "spec", "ruby", part, "**", "*_spec.rb"), recursive=True)):
            results.update(run_one(place, os.path.relpath(f, os.path.join(source, "spec", "ruby"))))
        return results

    return run


def tests(ruby, source, file):
    """One file of Ruby's own tests; again without the test that hangs, as long as one does."""

    def run(place):
        name = file.replace("/", "-")
        results, hung = {}, NEVER.copy()
        command = [ruby, "-Itool/lib", "-Itest/lib", "test/runner.rb", "-v", "--test-order=alpha", "--show-skip"]
        for turn in range(4):
            without = f"--name=!/#({'|'.join(re.escape(h) for h in hung)})\\z/"
            status, text = place.command(
                [*command, without, f"test/{file}.rb"], f"{name}-{turn}.log", TEST_SECONDS, cwd=source
            )
            began = re.findall(r"^\[ *\d+/\d+\] ([^\s(]+)", text, re.M)
            ended = re.findall(r"^\[ *\d+/\d+\] ([^\s(]+)(?:(?!^\[ *\d+/).|\n)*? = \d+\.\d+ s", text, re.M)
            bad = set(re.findall(r"^ *\d+\) (?:Failure|Error):\n([^\s(]+?)(?:\(.*|:| \[.*)$", text, re.M))
            skipped = set(re.findall(r"^ *\d+\) Skipped:\n(\S+?) \[", text, re.M))
            for test in ended:
                results[f"{file}:{test}"] = FAIL if test in bad else SKIP if test in skipped else PASS
            if status is not None or not began or began[-1] in ended or "#" not in began[-1]:
                break
            results[f"{file}:{began[-1]}"] = FAIL
            hung.append(began[-1].split("#")[1])
        if status not in (0, 1) and "Finished tests in" not in text or not results:
            results[f"{file}:all"] = FAIL
        return results

    return run


def prepare():
    need("ruby3.1")
    source = debian_source("ruby3.1")
    return [(part, unit("ruby3.1", source, part)) for part in PARTS]


def prepare_processes():
    need("ruby3.1")
    source = debian_source("ruby3.1")
    units = [(part, unit("ruby3.1", source, part, part in ONE_BY_ONE)) for part in PROCESSES]
    for pattern in TESTS:
        for f in sorted(glob.glob(os.path.join(source, "test", pattern + ".rb"))):
            file = os.path.relpath(f, os.path.join(source, "test"))[: -len(".rb")]
            units.append((file, tests("ruby3.1", source, file)))
    return units
