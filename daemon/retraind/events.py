"""The wire protocol from worker to supervisor: one JSON object a line, in an envelope.

Envelope: v (protocol), job, attempt, seq, t (seconds since the epoch), kind, and the kind's own fields in `body`.
A worker sends `hello` first and exactly one of `finished` and `failed` last. Readers count and ignore kinds they do
not know; a line that is not an envelope raises ProtocolError.
"""

import msgspec

from retraind import typed_json
from retraind.report import Check, Dataset, Gpu

PROTOCOL = 1
# The longest legal line: `ingested` names every column, a constant one twice, and a header may be 1 MiB of names.
MAX_LINE_BYTES = 4 * 2**20

# What a worker is told in place of an order that is still to come, and what it answers once it waits for one; the
# order's path follows, as a line, on the worker's standard input.
READY_ARGUMENT = "--ready"
READY_LINE = b"ready\n"

# What a preflight looks at and what it may say: closed sets, since both become labels of a metric.
CHECKS = (
    *("host.memory", "host.disk", "host.shm", "host.cpu"),
    *("gpu.present", "driver.kernel_module", "driver.device_nodes", "driver.nvml", "driver.version"),
    *("gpu.handle", "gpu.compute_mode", "gpu.memory_free", "gpu.temperature", "gpu.throttle"),
    *("pcie.width", "pcie.gen", "gpu.ecc_uncorrected", "gpu.row_remap", "gpu.retired_pages"),
    *("gpu.recovery_action", "gpu.xid", "gpu.persistence", "cuda.context"),
)
CHECK_STATUSES = ("pass", "warn", "fail", "skip", "unknown")


class ProtocolError(Exception):
    """The peer sent something that is not an event."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of the kinds below; the tag on the wire is the class's name in lower case."""


class Hello(Event, frozen=True, kw_only=True):
    """The worker runs."""

    pid: int
    python: str


class Stage(Event, frozen=True, kw_only=True):
    """A stage begins: preflight, ingest, import, train, evaluate."""

    name: str


class Checked(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Preflight is done. With CUDA a second one follows, which has what only torch can tell.

    `fallback` is not empty when the job goes to the CPU although there is a GPU: the checks because of which it does.
    """

    checks: list[Check]
    gpus: list[Gpu] = []
    fallback: str = ""


class Ingested(Event, frozen=True, kw_only=True):
    """The dataset is read, scaled and cached."""

    dataset: Dataset


class Progress(Event, frozen=True, kw_only=True):
    """Where training stands. `loss` is the running mean of this epoch, None before it is known."""

    epoch: int
    epochs: int
    loss: float | None
    rows_per_second: float
    seconds_left: float
    device: str


class Resumed(Event, frozen=True, kw_only=True):
    """Training does not begin, it goes on from a checkpoint: in this epoch, after so many steps in all."""

    epoch: int
    epochs: int
    num_steps: int


class Checkpointed(Event, frozen=True, kw_only=True):
    """The state of training after so many steps is durable: an attempt that ends now is gone on from here."""

    epoch: int
    epochs: int
    num_steps: int
    num_bytes: int


class Heartbeat(Event, frozen=True, kw_only=True):
    """Sent from the work loop when nothing else is: `done_share` of the running stage, None when unknown."""

    done_share: float | None = None


class Finished(Event, frozen=True, kw_only=True):
    """The candidate lies complete and durable in the work directory."""

    weights_sha256: str
    peak_bytes: int = 0


class Failed(Event, frozen=True, kw_only=True):
    """The worker gives up; its exit status tells the family, this the details."""

    code: str
    message: str
    line: int | None = None
    column: int | None = None
    remedy: str = ""
    sha256: str = ""  # of the dataset's bytes, where it is the dataset that is refused


KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind
    for kind in (Hello, Stage, Checked, Ingested, Progress, Resumed, Checkpointed, Heartbeat, Finished, Failed)
}


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What every line carries."""

    v: int
    job: str
    attempt: int
    seq: int
    t: float
    kind: str
    body: msgspec.Raw


def encode(event: Event, *, job: str, attempt: int, seq: int, t: float) -> bytes:
    """One line, newline included."""
    kind = type(event).__name__.lower()
    body = msgspec.Raw(msgspec.json.encode(event))
    return (
        msgspec.json.encode(Envelope(v=PROTOCOL, job=job, attempt=attempt, seq=seq, t=t, kind=kind, body=body)) + b"\n"
    )


def decode(line: bytes) -> tuple[Envelope, Event | None]:
    """The envelope and its event; None for a kind or a protocol version that this side does not know.

    Raises ProtocolError for anything that is not a well-formed envelope of a well-formed event.
    """
    try:
        envelope = typed_json.decode(line, Envelope)
        kind = KINDS.get(envelope.kind)
        if kind is None or envelope.v != PROTOCOL:
            return envelope, None
        return envelope, typed_json.decode(envelope.body, kind)
    except typed_json.Malformed as error:
        raise ProtocolError(f"not an event: {error}: {line[:200]!r}") from error
