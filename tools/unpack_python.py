"""Unpack the Python files of a wheel into a folder, without compiled parts or dependencies.

Usage: ``python tools/unpack_python.py NAME==VERSION FOLDER [SUFFIX ...]``, with the suffixes of other files that are
needed. It serves tests against the Python code of a package whose installation needs gigabytes or a GPU. Needs pip.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: platforms whose wheels are used on every machine, since their Python files are the same
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_34_x86_64")


def unpack(requirement: str, folder: Path, *suffixes: str) -> None:
    """Download and unpack a wheel, unless the folder already holds it.

    Args:
        requirement: "NAME==VERSION".
        folder: Folder for the files.
        *suffixes: Suffixes of additional files to unpack.
    """
    wanted = (".py", ".dist-info/METADATA", *suffixes)
    done, what = folder / "unpacked.txt", " ".join((requirement, *suffixes))
    if done.is_file() and done.read_text() == what:
        return
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
        subprocess.run([*command, *platforms, "--dest", download, requirement], check=True)
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(wanted)])
    done.write_text(what)


if __name__ == "__main__":
    unpack(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
