"""The lock of a run's folder binds all who come, also where the folder was removed and made again."""

import shutil
import threading
import time
from pathlib import Path

from storage.files import held


def test_who_waited_for_a_lock_whose_folder_was_removed_gets_that_of_the_new_folder(tmp_path: Path):
    lock, got = tmp_path / "run" / ".lock", []

    def wait() -> None:
        with held(lock, wait_s=20) as mine, held(lock) as somebody_else:
            got.append((mine, somebody_else))

    waiting = threading.Thread(target=wait)
    with held(lock) as mine:
        assert mine
        waiting.start()
        time.sleep(0.3)  # by then it waits for this file
        shutil.rmtree(lock.parent)
    waiting.join(timeout=30)
    assert got == [(True, False)]
