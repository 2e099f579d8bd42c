"""The configuration as frozen, typed values: every key, its default and its range. No I/O.

The defaults suit a server: a configuration file may be empty. Each field's comment is the reason for its default;
etc/retraind.yaml says the same to operators, and a test holds the two together. Reading YAML is config_file's work.
"""

import hashlib
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

Device = Literal["auto", "cuda", "cpu"]
Precision = Literal["auto", "bf16", "fp16", "float32"]
LogLevel = Literal["debug", "info", "warning", "error"]
ColumnKind = Literal["metric", "counter", "time", "identifier", "label", "ignore"]

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]
Share = Annotated[float, Meta(ge=0, le=1)]
# A program and its arguments, run without a shell; empty is none.
Command = tuple[str, ...]
# The model's name becomes a directory and a file name, so it must not leave models.dir.
Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$", description="letters, digits, `_`, `.` and `-`")
]
Address = Annotated[
    str,
    Meta(pattern=r"^(\[[0-9A-Fa-f:.]*\]|[^:\[\]]*):[0-9]{1,5}$", description="host:port or [address]:port"),
]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section."""

    # Keys that the file's format has and this service has not, each with what to do instead.
    unsupported: ClassVar[dict[str, str]] = {}


class SpoolConfig(Section, frozen=True, kw_only=True):
    """Where datasets arrive; incoming/, active/, done/ and quarantine/ lie below it on one filesystem."""

    dir: Path = Path("/var/spool/retraind")
    # None keeps everything in done/: whose bytes these are, the service does not know.
    done_max_age_days: Annotated[float, Meta(gt=0, le=36_500)] | None = None
    done_max_bytes: Positive | None = None


class ModelsConfig(Section, frozen=True, kw_only=True):
    """Where models are published."""

    dir: Path = Path("/var/models")
    name: Name = "telemetry_autoencoder"
    # Enough to go back by, and a bound for the disk. The live version, the one before and pinned ones are kept anyway.
    keep: Positive | None = 10


class StateConfig(Section, frozen=True, kw_only=True):
    """Where jobs are remembered."""

    dir: Path = Path("/var/lib/retraind")


class LimitsConfig(Section, frozen=True, kw_only=True):
    """What is left to the rest of the machine."""

    # Room for a candidate, a version and the journal on the smallest server; 0 is no floor.
    min_free_bytes: Annotated[int, Meta(ge=0)] = 256 * 2**20


class MetricsConfig(Section, frozen=True, kw_only=True):
    """The HTTP endpoint. Local by default: without a web configuration it has no authentication."""

    listen: Address = "127.0.0.1:10935"
    # TLS, passwords and headers, in the file format of Prometheus's exporters. None is plain HTTP for everybody.
    web_config: Path | None = None


class IntakeConfig(Section, frozen=True, kw_only=True):
    """When a file in incoming/ counts as complete."""

    # Longer than the pause between two writes of cp, scp or rsync over a slow link; short beside a training run.
    quiet_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 2.0
    # inotify wakes the service at once; the scan is there for what inotify does not tell.
    rescan_seconds: Annotated[float, Meta(gt=0, le=86_400)] = 10.0
    # rsync without --remove-source-files sends everything again once the spool is empty: old data must not become the
    # live model again. "train" is for those who drop a file twice on purpose.
    duplicates: Literal["skip", "train"] = "skip"


class WorkerConfig(Section, frozen=True, kw_only=True):
    """The process that trains."""

    # "auto" is the interpreter that runs the service. Another one needs torch, numpy, pandas and msgspec, not retraind.
    python: str = "auto"
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    # Importing torch takes up to 15 s on a busy machine, and a stuck driver never comes back.
    silence_seconds: Seconds = 300.0
    max_seconds: Seconds = 86_400.0
    # Below the unit's TimeoutStopSec, so that systemd never has to kill.
    stop_seconds: Seconds = 15.0
    # Importing torch is most of a small file's time. Files that come more often than this find a worker that has done
    # it; for rarer ones it is begun while they settle. 0 keeps none.
    keep_ready_seconds: Annotated[float, Meta(ge=0, le=31_536_000)] = 600.0


class PreflightConfig(Section, frozen=True, kw_only=True):
    """When a GPU is fit for a job. With `device: cpu` nothing here counts."""

    min_gpus: Positive = 1
    # A narrow link is warned of in any case. None refuses none: slot and riser may be meant to be as they are.
    min_width: Annotated[int, Meta(ge=1, le=32)] | None = None
    min_gen: Annotated[int, Meta(ge=1, le=8)] | None = None
    # Above it, or five degrees below the point at which the card itself slows down, whatever is lower.
    max_temperature_celsius: Annotated[int, Meta(ge=40, le=120)] = 90
    # Memory that could not be corrected may have been a weight's.
    ecc_errors: Literal["fail", "warn"] = "fail"
    # A check that can not be made is no fault of the machine; some fleets want to know all the same.
    strict: bool = False
    # NVML starts in milliseconds, and in some seconds where no program keeps the driver loaded.
    deadline_seconds: Annotated[float, Meta(gt=0, le=60)] = 5.0


class DataConfig(Section, frozen=True, kw_only=True):
    """What a dataset may be."""

    min_rows: Annotated[int, Meta(ge=2)] = 2  # BatchNorm has no variance below two rows
    max_bytes: Positive = 64 * 2**30
    # A compressed file of 1 MB can hold 1 GB: what comes out is bounded on its own.
    max_uncompressed_bytes: Positive = 256 * 2**30
    # Real telemetry packs 3 to 60 times, gzip reaches 1000 with nothing but zeros. Not asked below 64 MiB.
    max_unpack_ratio: Positive = 200
    max_columns: Positive = 4096
    max_line_bytes: Annotated[int, Meta(ge=1024)] = 2**20
    # Above this share the file is not what its producer meant, and learning from the rest would hide that.
    max_bad_share: Share = 0.2
    # Of the cells of rows that are used. What is missing is left out of training and score: a few cells cost nothing,
    # but a table of holes is not what its producer meant.
    max_missing_share: Share = 0.2
    # What a column is follows from its name and content; these are for what can not be told so.
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    schema: dict[str, ColumnKind] = {}
    # Programs that use the model were written for its metrics. A producer that loses a column, or a file that was meant
    # for elsewhere, must not put a model of other inputs in its place unseen.
    metrics: Literal["published", "own"] = "published"
    # A raw counter is new in every row. But whoever feeds the model by programs of their own must then make rates, too.
    counters: Literal["raw", "rate", "auto"] = "raw"


class TrainingConfig(Section, frozen=True, kw_only=True):
    """What decides the model, beside the data."""

    # A number of epochs is a different number of steps on every file: auto trains until held-out rows say enough.
    epochs: Annotated[int, Meta(ge=1, le=100_000)] | Literal["auto"] = "auto"
    # At most: with epochs: auto a small file gets smaller batches, so that there are steps enough to learn.
    batch_size: Annotated[int, Meta(ge=2, le=2**24)] = 2048
    # Rows that the model sees at once. On labelled machines five find much that one does not, and more find less.
    window: Annotated[int, Meta(ge=1, le=100)] = 5
    # A model that is drawn anew forgets what was wrong with the one before, and the same file gives the same weights.
    warm_start: bool = False
    learning_rate: Annotated[float, Meta(gt=0, le=10)] = 1e-3
    weight_decay: Annotated[float, Meta(ge=0, le=10)] = 1e-4
    precision: Precision = "auto"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    # Batches are gathered from memory in the training process: faster than any number of loader processes.
    num_workers: Annotated[int, Meta(ge=0, le=64)] = 0
    # One thread: for a net this small a second one gains 1.4 times on an idle machine and loses 20 times on a busy one.
    num_threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    holdout_share: Annotated[float, Meta(ge=0, le=0.5)] = 0.1
    # What a crash may cost: at most a minute of training. A checkpoint takes some milliseconds. None writes and reads
    # none. The one key here that does not decide the weights: see `decisive`.
    checkpoint_seconds: Seconds | None = 60.0
    # One row a minute: about three false alarms in two days. Ten times rarer asks for ten times the held-out rows.
    false_alarm_share: Annotated[float, Meta(gt=0, le=0.5)] = 1e-3


class GateConfig(Section, frozen=True, kw_only=True):
    """What a candidate must show before it is published."""

    # In units of the metrics' own variance: 1.0 is a model no better than predicting each metric's mean.
    max_heldout_loss: Annotated[float, Meta(gt=0)] | None = None
    # Such a model finds no more than the plain size of the scaled values does, and would replace one that may.
    worse_than_mean: Literal["reject", "publish"] = "reject"
    # A model that is worse at the newest rows than the one that is live would only make things worse.
    policy: Literal["not_worse", "publish_always", "manual"] = "not_worse"
    # Seeds alone move the held-out error: this is above what they did on public machines (benchmarks/RESULTS.md).
    margin: Annotated[float, Meta(ge=0, le=100)] = 0.25

    @property
    def makes_live(self) -> bool:
        """Whether what passes becomes live by itself."""
        return self.policy != "manual"


class PublishConfig(Section, frozen=True, kw_only=True):
    """Programs of yours around a publication. They run as the service's user, within the unit's sandbox."""

    hook: Command = ()
    hook_timeout_seconds: Seconds = 60.0
    sign: Command = ()


class LogConfig(Section, frozen=True, kw_only=True):
    """What goes to the journal."""

    level: LogLevel = "info"


class Config(Section, frozen=True, kw_only=True):
    """All of it. Paths are absolute once config_file has read them."""

    device: Device = "auto"
    spool: SpoolConfig = SpoolConfig()
    models: ModelsConfig = ModelsConfig()
    state: StateConfig = StateConfig()
    limits: LimitsConfig = LimitsConfig()
    metrics: MetricsConfig = MetricsConfig()
    intake: IntakeConfig = IntakeConfig()
    worker: WorkerConfig = WorkerConfig()
    preflight: PreflightConfig = PreflightConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    gate: GateConfig = GateConfig()
    publish: PublishConfig = PublishConfig()
    log: LogConfig = LogConfig()


# A reload can not move these: files, sockets and locks stand there. A change is named and waits for a restart.
RESTART_KEYS: tuple[str, ...] = (
    "spool.dir",
    "models.dir",
    "models.name",
    "state.dir",
    "metrics.listen",
    "metrics.web_config",
)


def get_key(config: Config, key: str) -> object:
    """The value of a dotted key."""
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def restart_changes(old: Config, new: Config) -> list[str]:
    """The keys that differ and take effect at a restart only."""
    return [key for key in RESTART_KEYS if get_key(old, key) != get_key(new, key)]


def keep_restart_keys(old: Config, new: Config) -> Config:
    """`new`, with the keys that only a restart can change as they are in `old`."""
    spool = msgspec.structs.replace(new.spool, dir=old.spool.dir)
    models = msgspec.structs.replace(new.models, dir=old.models.dir, name=old.models.name)
    return msgspec.structs.replace(new, spool=spool, models=models, state=old.state, metrics=old.metrics)


def decisive(training: TrainingConfig) -> dict[str, object]:
    """The training settings that decide the weights, by name."""
    values = msgspec.structs.asdict(training)
    del values["checkpoint_seconds"]
    return values


def settings_fingerprint(config: Config) -> str:
    """Names what decides the weights beside the data: two jobs with one content and one fingerprint are duplicates."""
    settings = (config.device, config.data, decisive(config.training), config.models.name)
    return hashlib.sha256(msgspec.json.encode(settings)).hexdigest()[:16]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`; an empty host is every interface. Raises ValueError."""
    host, _, port = address.rpartition(":")
    number = int(port)
    if number > 65_535:
        raise ValueError(f"port {number} is above 65535")
    return host.strip("[]"), number
