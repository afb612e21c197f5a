"""`engine serve` as a process."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def served(engine: Path, log: Path, *options: str) -> Iterator[str]:
    """`engine serve` on a free port; gives its address once it is ready, and sees that it ends well."""
    command = [
        sys.executable,
        "-m",
        "enginewright",
        "serve",
        str(engine),
        "--port",
        "0",
        "--threads",
        "1",
        *options,
    ]
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=dict(os.environ)) as process,
    ):
        try:
            deadline = time.monotonic() + 120
            while not re.search(r"ready: ", said := log.read_text()):
                assert process.poll() is None and time.monotonic() < deadline, said
                time.sleep(0.05)
            address = re.search(r"http://[\d.]+:\d+", said)
            assert address is not None, said
            yield address[0]
            process.terminate()
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
