"""The team of threads: it sleeps when idle, follows the machine's limits, bears too many threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from enginewright.backends.cpu import _native
from tests.backends.cpu.small_programs import Pages, model, step_input


def test_idle_engines_use_no_cpu(tmp_path: Path) -> None:
    executors = [model().load(tmp_path, threads=4) for _ in range(2)]
    step = step_input(Pages([16, 32], 64), [(0, 0, [1, 2, 3])])
    for executor in executors:
        executor.step(step)
    time.sleep(0.01)  # the workers spin for some microseconds before they sleep
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.05
    for executor in executors:  # and wake up again
        executor.step(step)
        executor.close()


def test_many_steps_on_more_threads_than_cores(tmp_path: Path) -> None:
    program = model(experts=3)
    one, many = (program.load(tmp_path, threads=threads) for threads in (1, 8))
    pages = Pages([16, 32], 64)
    want = [one.step(step_input(pages, [(0, at, [at % 50])])) for at in range(40)]
    pages = Pages([16, 32], 64)
    for at in range(40):
        assert np.array_equal(many.step(step_input(pages, [(0, at, [at % 50])])), want[at])
        if at % 10 == 0:
            time.sleep(0.002)  # long enough to fall asleep


def test_the_default_follows_the_affinity_mask(tmp_path: Path) -> None:
    cpus = os.sched_getaffinity(0)
    assert 1 <= _native.usable_cpus() <= len(cpus)
    code = f"import os; os.sched_setaffinity(0, {{{min(cpus)}}}); "
    code += "from enginewright.backends.cpu import _native; print(_native.usable_cpus())"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "1"
    )
    executor = model().load(tmp_path)
    assert executor.threads == _native.usable_cpus()


def test_two_engines_step_at_once_and_one_engine_refuses_to(tmp_path: Path) -> None:
    program = model("f32", experts=4)
    executors = [program.load(tmp_path, threads=2) for _ in range(2)]
    step = step_input(Pages([16, 32], 64), [(0, 0, list(range(50)) * 4)], [199])
    want = executors[0].step(step)
    results: list[object] = []

    def run(index: int) -> None:
        for _ in range(10):
            try:
                results.append(np.array_equal(executors[index].step(step), want))
            except RuntimeError as error:
                results.append(str(error))

    for indices in ((0, 1), (0, 0)):
        results.clear()
        threads = [threading.Thread(target=run, args=(index,)) for index in indices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 20 and set(results) <= {
            True,
            *(["another step is running on this engine"] if indices == (0, 0) else []),
        }


@pytest.mark.parametrize("threads", [1, 3, 17])
def test_engines_come_and_go(tmp_path: Path, threads: int) -> None:
    program = model()
    program.load(tmp_path, threads=threads).close()
    before = len(os.listdir("/proc/self/task"))  # other tests' threads among them
    for _ in range(20):
        program.load(tmp_path, threads=threads).close()
    assert len(os.listdir("/proc/self/task")) <= before  # the native workers are joined
