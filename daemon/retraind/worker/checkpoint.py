"""Training on disk: what another process needs to go on where this one was, as one file of the work directory.

Owns the file's format and the decision whether a file may be gone on from. Atomic, synced and checksummed; builtin
types and tensors only, never a class or code. Never trains, and never fails a job: a checkpoint that can not be written
is a warning, one that can not be used a line in the log, and the job trains from the start. Raises nothing of its own.

No state of a random generator is kept, since training draws from none that goes on: the order of rows is a function of
seed and epoch. The cache of rows is not kept either but made anew by the next attempt. It is not synced, so only a hash
of all of it could tell whether it is whole, and a job that waits for a fault to heal would hold its disk. What this
costs is the reading: 1.7 s for 500,000 rows of 32 metrics (140 MiB of text), as long as seven epochs take.
"""

import io
import logging
import pickle
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from retraind import fsio, typed_json
from retraind.config import DataConfig

log = logging.getLogger(__name__)

# Raised whenever the meaning of the state changes: an older file is then not gone on from.
SCHEMA = 3
# What training says of itself: names to numbers, tensors, and lists and dictionaries of them.
State = dict[str, Any]
_DIGEST_BYTES = 64


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that must be the same for the state to be that of the same training: of what, with what, by what."""

    schema: int
    torch: str  # major.minor: its kernels decide the last bits
    job: str
    dataset: str  # sha256 of the content
    metric_names: list[str]
    num_rows: int
    device: str
    precision: str  # in force, not as asked for
    training: dict[str, object]  # what decides the weights: config.decisive
    data: DataConfig


def identity_of(
    *,
    job: str,
    dataset: str,
    metric_names: list[str],
    num_rows: int,
    device: str,
    precision: str,
    training: dict[str, object],
    data: DataConfig,
) -> Identity:
    """The identity of a training by this torch; `num_rows` are those to train on."""
    return Identity(
        schema=SCHEMA,
        torch=".".join(str(torch.__version__).split(".")[:2]),
        job=job,
        dataset=dataset,
        metric_names=metric_names,
        num_rows=num_rows,
        device=device,
        precision=precision,
        training=training,
        data=data,
    )


class Checkpoints:
    """The checkpoint of one training: when one is due, writing it, reading that of an earlier attempt."""

    def __init__(self, path: Path, identity: Identity, every_seconds: float) -> None:
        self._path = path
        self._identity = identity
        self._every_seconds = every_seconds
        self._written_at = time.monotonic()

    def is_due(self) -> bool:
        """Whether `every_seconds` have gone by since the last one, or since the start."""
        return time.monotonic() - self._written_at >= self._every_seconds

    def write(self, state: State) -> int:
        """Makes `state` durable in place of the one before and returns its size; 0 with a warning when it can not.

        If power fails here, the old checkpoint is there or the new one. Costs two fsyncs, and waits for the device.
        """
        data = encode(self._identity, state)
        try:
            fsio.write_atomic(self._path, data, mode=0o640)
        except OSError as error:
            log.warning("no checkpoint, training goes on: %s: %s", self._path, error.strerror)
            data = b""
        self._written_at = time.monotonic()
        return len(data)

    def read(self) -> State | None:
        """The state to go on from; None where there is none, and with a line in the log where it can not be used."""
        try:
            return decode(self._path.read_bytes(), self._identity)
        except FileNotFoundError:
            return None
        except Unusable as error:
            log.warning("checkpoint ignored, training from the start: %s: %s", self._path, error)
        except OSError as error:
            log.warning("checkpoint ignored, training from the start: %s: %s", self._path, error.strerror)
        return None


class Unusable(ValueError):
    """The bytes are no checkpoint, or that of another training."""


def encode(identity: Identity, state: State) -> bytes:
    """A digest of the rest, the identity, and the state as torch.save writes it: two lines and an archive."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    rest = msgspec.json.encode(identity) + b"\n" + buffer.getvalue()
    return fsio.sha256_of_bytes(rest).encode() + b"\n" + rest


def decode(data: bytes, identity: Identity) -> State:
    """The state of a checkpoint of that identity, tensors on the CPU. Raises Unusable.

    The digest is compared before anything is parsed: torch does not look at its archive's own checksums.
    """
    digest, rest = data[: _DIGEST_BYTES + 1], data[_DIGEST_BYTES + 1 :]
    if digest != fsio.sha256_of_bytes(rest).encode() + b"\n":
        raise Unusable(f"damaged: its {len(data)} bytes do not have the digest that was written")
    line, _, archive = rest.partition(b"\n")
    try:
        found = typed_json.decode(line, Identity)
    except typed_json.Malformed as error:
        raise Unusable(f"written by another version of the service: {error}") from error
    if difference := _difference(found, identity):
        raise Unusable(f"of another training: {difference}")
    try:
        return cast("State", torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True))
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise Unusable(f"torch {torch.__version__} can not load it: {error}") from error


def _difference(found: Identity, wanted: Identity) -> str:
    """The first fact in which two identities differ, in words; empty when there is none."""
    facts, expected = _flat(found), _flat(wanted)
    for name in [*expected, *facts]:
        if facts.get(name) != expected.get(name):
            return f"{name} was {facts.get(name)}, now it is {expected.get(name)}"
    return ""


def _flat(identity: Identity) -> dict[str, object]:
    """Every fact by its dotted name."""
    flat: dict[str, object] = {}
    for name, value in msgspec.to_builtins(identity).items():
        flat.update(
            {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat
