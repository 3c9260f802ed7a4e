"""The token of a job is in the environment of its workers, where other users cannot read it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

READ = """
import os, sys
os.setgid(65534)
os.setuid(65534)
try:
    print(open(f"/proc/{sys.argv[1]}/environ", "rb").read())
except PermissionError:
    print("denied")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_read_the_token() -> None:
    command = [sys.executable, "-I", "-S", "-c", READ, str(os.getpid())]

    told = subprocess.run(command, capture_output=True, timeout=60, check=True, text=True)

    assert told.stdout.strip() == "denied"
