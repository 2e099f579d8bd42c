"""What must be held whole before it can be read, since it does not lie in the order of reading: in a temporary file.

Owns that file: unnamed, in memory as long as it is small, gone with the process. Raises DataError too_large for what
its filesystem could not hold if it were empty; OSError unchanged for one that is full now.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from retraind.errors import DataError
from retraind.worker.readers.source import Source

BLOCK_BYTES = 4 * 2**20
MAX_IN_MEMORY_BYTES = 16 * 2**20


@contextmanager
def opened(spill_dir: Path | None, num_bytes: int) -> Iterator[IO[bytes]]:
    """An empty file for at least `num_bytes`, in `spill_dir` or where the system has such files."""
    place = spill_dir or Path(tempfile.gettempdir())
    facts = os.statvfs(place)
    size = facts.f_blocks * facts.f_frsize  # 0 where a filesystem does not tell
    if size and num_bytes > max(size, MAX_IN_MEMORY_BYTES):
        raise DataError(
            "too_large",
            f"{num_bytes:,} bytes must lie in {place} while they are read, whose filesystem has {size:,} in all",
            remedy="move state.dir to a larger filesystem, or split the file",
        )
    with tempfile.SpooledTemporaryFile(MAX_IN_MEMORY_BYTES, dir=str(place)) as file:
        yield file


@contextmanager
def copied(source: Source, spill_dir: Path | None) -> Iterator[IO[bytes]]:
    """All that is left of the content, which is not less than the file has."""
    with opened(spill_dir, source.size) as file:
        while block := source.read(BLOCK_BYTES):
            file.write(block)
        yield file
