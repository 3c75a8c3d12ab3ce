"""Ruby's specification of its sockets, from Debian's source package: the small print of each call, and IO's."""

import os
import re

from .frame import FAIL, PASS, debian_source, need

PARTS = ["library/socket", "library/net", "core/io", "core/kernel"]
SECONDS = 150


def unit(ruby, source, part):
    def run(place):
        name = part.replace("/", "-")
        xml_file = os.path.join(place.folder, name + ".xml")
        scratch = os.path.join(place.folder, name)
        os.makedirs(scratch)
        command = [ruby, "-Ispec/mspec/lib", "spec/mspec/bin/mspec-run", "-f", "j", "-o", xml_file, f"spec/ruby/{part}"]
        status, _ = place.command(command, name + ".log", SECONDS, cwd=source, env={"SPEC_TEMP_DIR": scratch})
        results = {}
        # What it writes is not always XML.
        if status in (0, 1):
            with open(xml_file, encoding="utf-8", errors="replace") as f:
                cases = re.findall(r'<testcase .*?name="(.*?)" time=.*?>(.*?)</testcase>', f.read(), re.DOTALL)
            for name, told in cases:
                # One name may stand for several examples.
                good = not re.search("<(failure|error)", told) and results.get(f"{part}:{name}") != FAIL
                results[f"{part}:{name}"] = PASS if good else FAIL
        if not results:
            results[f"{part}:all"] = FAIL
        return results

    return run


def prepare():
    need("ruby3.1")
    source = debian_source("ruby3.1")
    return [(part, unit("ruby3.1", source, part)) for part in PARTS]
