"""Parquet files to rows of float64.

The file is copied to an unnamed temporary file, since it is read from its end, and read in batches of rows. What its
columns mean is `arrowtable`'s. Raises DataError truncated, malformed, no_rows, too_large, unsupported_format for an
encrypted file, and what `arrowtable` raises.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from retraind.errors import DataError
from retraind.worker.readers.arrowtable import BLOCK_BYTES, MAX_GROUP_BYTES, ArrowTableReader
from retraind.worker.readers.columns import SAMPLE_ROWS
from retraind.worker.readers.source import Source
from retraind.worker.readers.spill import copied

MAGIC, ENCRYPTED_MAGIC = b"PAR1", b"PARE"
FLOAT_BYTES = 8
MIN_BUFFER_BYTES = 2**14


class ParquetReader(ArrowTableReader):
    """Reads one file."""

    format = "parquet"
    what = "Apache Parquet file"

    def parts(self, source: Source, spill_dir: Path | None) -> Iterator[Any]:
        """The schema, then batches of rows, of the columns of numbers alone."""
        with copied(source, spill_dir) as file:
            _check_end(file)
            with self.errors():
                table = self._opened(file)
                schema = table.schema_arrow
            yield schema
            _check_sizes(table.metadata, len(self.numeric_names), source)
            num_rows = max(SAMPLE_ROWS, BLOCK_BYTES // (8 * max(1, len(self.numeric_names))))
            batches = table.iter_batches(batch_size=num_rows, columns=self.numeric_names, use_threads=False)
            while True:
                with self.errors():
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

    def _opened(self, file: IO[bytes]) -> Any:
        """The columns are read through a buffer each, or pyarrow would hold a whole group of rows, packed."""
        library = self.arrow.parquet
        metadata = library.read_metadata(file)
        buffer_bytes = max(MIN_BUFFER_BYTES, BLOCK_BYTES // max(1, metadata.num_columns))
        return library.ParquetFile(
            file, metadata=metadata, pre_buffer=False, buffer_size=buffer_bytes, page_checksum_verification=True
        )


def _check_end(file: IO[bytes]) -> None:
    """A Parquet file ends as it begins."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(MAGIC)))
    end = file.read()
    file.seek(0)
    if end == ENCRYPTED_MAGIC:
        raise DataError("unsupported_format", "the Parquet file is encrypted", remedy="write it without encryption")
    if end != MAGIC or size < 3 * len(MAGIC):
        raise DataError("truncated", "the Parquet file has no end", remedy="the copy was cut short: copy it again")


def _check_sizes(metadata: Any, num_columns: int, source: Source) -> None:
    if metadata.num_rows == 0:
        raise DataError("no_rows", "the Parquet file has no rows", remedy="write rows of numbers")
    sizes = [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]
    # What lies there may be packed twice: a column of one value has some bytes, whatever the number of rows.
    source.unpacks_to(max(sum(sizes), metadata.num_rows * num_columns * FLOAT_BYTES))
    if max(sizes) > MAX_GROUP_BYTES:
        raise DataError(
            "too_large",
            f"a row group has {max(sizes):,} bytes unpacked; {MAX_GROUP_BYTES:,} are allowed",
            remedy="write row groups of fewer rows",
        )
