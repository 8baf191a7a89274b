"""A live process, a dead one, and one that cannot be seen from here."""

import os
import subprocess
import sys
import time
from dataclasses import replace

from prism_lm.parallel.process_identity import identify_process, read_start_time


def test_this_process_lives_and_one_started_at_another_time_does_not() -> None:
    here = identify_process()
    assert here.is_alive() is True and here.pid == os.getpid()
    assert replace(here, process_start_time=here.process_start_time - 1).is_alive() is False


def test_process_that_ended_unnoticed_by_its_parent_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    time.sleep(1.0)
    assert read_start_time(child.pid) == 0
    child.wait()
    assert read_start_time(child.pid) == 0


def test_process_of_another_boot_or_container_cannot_be_seen() -> None:
    here = identify_process()
    assert replace(here, boot_id="another").is_alive() is None
    assert replace(here, pid_namespace="pid:[1]").is_alive() is None
    assert replace(here, boot_id="").is_alive() is None
