"""The interception in tests/disk_faults.py sees every system call that changes the disk; strace is the witness."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests import crash_driver
from tests.disk_faults import count_calls

SCRIPT = """
import sys
from pathlib import Path
from tests import crash_driver
root = Path(sys.argv[1])
crash_driver.prepare_store(root)
crash_driver.store(root).save(crash_driver.state(2), 2)
"""
TRACED = (
    "write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,sync_file_range,rename,renameat,renameat2,mkdir,mkdirat,"
    "unlink,unlinkat,rmdir,ftruncate,truncate,link,linkat,sendfile,copy_file_range,splice,fallocate"
)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_no_disk_call_of_a_save_escapes_the_enumeration(tmp_path):
    root, log = tmp_path / "run", tmp_path / "trace"
    command = ["strace", "-f", "-y", "-qq", "--seccomp-bpf", "-e", f"trace={TRACED}", "-o", str(log)]
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT, str(root)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip(f"strace cannot trace here: {done.stderr.strip()[:100]}")
    assert done.returncode == 0, done.stderr

    seen: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        match = re.match(r"\d+ +(\w+)\(", line)
        if match and str(root) in line:
            seen[{"unlinkat": "unlink", "renameat": "rename", "mkdirat": "mkdir"}.get(match[1], match[1])] += 1

    def both() -> None:
        crash_driver.prepare_store(tmp_path / "again")
        crash_driver.store(tmp_path / "again").save(crash_driver.state(2), 2)

    expected = Counter(name for name in count_calls(both) if name not in ("open", "close"))
    assert seen == expected
    assert set(seen) == {"write", "fsync", "rename", "mkdir", "unlink", "rmdir"}
