"""What the virtual machines of `ci/rdma-vm` and `ci/aarch64` share."""

import os
import subprocess
import sys


def cpio(entries):
    """An archive in the `newc` format of `(name, mode, data)`: an initial RAM disk."""
    out = bytearray()

    def pad():
        out.extend(b"\0" * (-len(out) % 4))

    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        path = name.encode() + b"\0"
        fields = [number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0]
        out.extend(b"070701" + b"".join(b"%08X" % f for f in fields) + path)
        pad()
        out.extend(data)
        pad()
    return bytes(out)


def install(who, packages):
    """Installs what is missing of Debian's packages. Ends the program if it may not."""
    installed = lambda p: subprocess.run(["dpkg", "-s", p], capture_output=True).returncode == 0
    missing = [p for p in packages if not installed(p)]
    if not missing:
        return
    if os.geteuid() != 0:
        sys.exit(f"{who}: missing: {' '.join(missing)}; install them as root, or run this as root")
    print(f"{who}: installing {' '.join(missing)}", file=sys.stderr)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    quiet = ["-qq", "-o", "DPkg::Lock::Timeout=300"]
    subprocess.run(["apt-get", "update", *quiet], env=env, stdout=subprocess.DEVNULL)
    command = ["apt-get", "install", "-y", "--no-install-recommends", *quiet, *missing]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
