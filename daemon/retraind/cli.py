"""The command line: arguments and exit statuses, nothing else. Each verb's work is in commands/, imported when asked.

Exit statuses follow sysexits.h where it has a fitting one. The help and the manual are made from EXIT_STATUSES and
from the parser: what is said of a command is said here.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from retraind import __version__
from retraind.config import Config, TrainingConfig
from retraind.errors import ConfigError, HostError, RetraindError, UsageError
from retraind.printable import printable

DEFAULT_CONFIG = Path("/etc/retraind/retraind.yaml")
_EXIT_USAGE = 64
MODEL_ACTIONS = ("list", "show", "verify", "rollback", "promote", "pin", "unpin")
EXIT_STATUSES = {
    0: "done",
    1: "the gate rejected the model (`train`), or something is to be warned of (`preflight`)",
    2: "a job would be deferred (`preflight`)",
    64: "the arguments do not make sense, or name what does not exist",
    65: "the dataset can not be used: the message says where and why; a version is damaged (`models verify`)",
    69: "the machine can not do it now: a path, a port, memory, a missing package; no service runs (`status`)",
    70: "training failed, or its process was lost",
    71: "memory ran out",
    73: "the model could not be put in place",
    74: "the dataset was written to while it was read",
    75: "interrupted at a safe point",
    78: "the configuration has errors",
    130: "interrupted by Ctrl-C where there is no safe point to wait for",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(_EXIT_USAGE, f"{self.prog}: error: {message}\n")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    common = _Parser(add_help=False)
    common.add_argument(
        "--config", type=Path, metavar="FILE",
        help=f"configuration file (default: {DEFAULT_CONFIG}, or built-in defaults where it does not exist)",
    )  # fmt: skip
    json = _Parser(add_help=False)
    json.add_argument("--json", action="store_true", help="print JSON on standard output, for scripts")
    parser = _Parser(
        prog="retraind", formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["exit status:", *(f"  {status:<5}{meaning}" for status, meaning in EXIT_STATUSES.items())]),
        description="Retrains an autoencoder on telemetry files and publishes its weights atomically.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"retraind {__version__}", help="print the version")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)

    def verb(name: str, summary: str, details: str, *parents: _Parser) -> _Parser:
        return verbs.add_parser(
            name, help=summary, parents=[common, *parents],
            description=f"{summary[0].upper()}{summary[1:]}.\n\n{details}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    verb("serve", "run the service until SIGTERM", _SERVE)
    train = verb("train", "train on files once, in the foreground, and publish", _TRAIN, json)
    train.add_argument("files", type=Path, nargs="+", metavar="FILE", help="telemetry files, read as one dataset")
    train.add_argument("--models", type=Path, metavar="DIR", help="where to publish (default: models.dir)")
    train.add_argument("--epochs", type=int, metavar="N", help="how often each row is seen (default: training.epochs)")
    train.add_argument("--batch-size", type=int, metavar="N", help="rows in one step (default: training.batch_size)")
    train.add_argument(
        "--seed", type=int, metavar="N", help="of the first weights and the order of rows (default: training.seed)"
    )
    train.add_argument("--device", choices=("auto", "cuda", "cpu"), help="where to train (default: the key `device`)")
    inspect = verb("inspect", "show what training would use of a file", _INSPECT, json)
    inspect.add_argument("files", type=Path, nargs="+", metavar="FILE", help="telemetry files, read as one dataset")
    score = verb("score", "score the rows of files with a published model", _SCORE)
    score.add_argument("files", type=Path, nargs="+", metavar="FILE", help="telemetry files with the model's metrics")
    score.add_argument(
        "--model", type=Path, metavar="DIR",
        help="a model's directory or one version's (default: the live version in models.dir)",
    )  # fmt: skip
    score.add_argument("--out", type=Path, metavar="FILE", help="where to write (default: `-`, standard output)")
    score.add_argument(
        "--format", choices=("csv", "jsonl", "parquet"), default="csv", help="how to write (default: csv)"
    )
    verb("check", "check the configuration, the paths, the port and the worker", _CHECK, json)
    verb("preflight", "check the host and the GPU as before every job", _PREFLIGHT, json)
    verb("status", "show what the service is doing", _STATUS, json)
    jobs = verb("jobs", "list the jobs and what became of them", _JOBS, json)
    jobs.add_argument("--limit", type=_count, metavar="N", help="show the newest N (default: 50, with --json all)")
    requeue = verb("requeue", "put quarantined datasets back into the spool", _REQUEUE)
    which = requeue.add_mutually_exclusive_group(required=True)
    which.add_argument("job", nargs="?", metavar="JOB", help="a job id as `retraind jobs` shows it")
    which.add_argument("--all-quarantined", action="store_true", help="every file in quarantine/")
    hold = verb("hold", "keep an open job, or the whole queue, from being started", _HOLD)
    which = hold.add_mutually_exclusive_group(required=True)
    which.add_argument("job", nargs="?", metavar="JOB", help="the id of an open job as `retraind jobs` shows it")
    which.add_argument("--all", action="store_true", help="the whole queue: nothing new is started")
    release = verb("release", "let what is held go on", _RELEASE)
    which = release.add_mutually_exclusive_group(required=True)
    which.add_argument("job", nargs="?", metavar="JOB", help="the id of a held job as `retraind jobs` shows it")
    which.add_argument("--all", action="store_true", help="the queue, and every job that is held")
    models = verb("models", "list, check, roll back and pin the published versions", _MODELS, json)
    models.add_argument(
        "action", nargs="?", choices=MODEL_ACTIONS, default="list", help="what to do (default: list them)"
    )
    models.add_argument("version", nargs="?", metavar="VERSION", help="as the list has it, or its number alone")
    models.add_argument("--all", action="store_true", help="verify every version")
    return parser


_SERVE = """Watches spool.dir/incoming, trains on each file that is dropped there, one at a time, and
publishes to models.dir. Meant to be started by systemd; SIGHUP reloads the configuration."""
_TRAIN = """The same worker, gate and publication as the service's, without a spool:
  retraind train node-42.csv --models ./models
  retraind train mon.csv tue.csv.gz --models ./models --epochs 20
Exit status 1: the gate rejected the model, nothing was published."""
_INSPECT = """Trains nothing and needs no torch. Prints the format, the rows used and dropped, and the
metrics with their centre and scale, or where and why the file would be refused (exit status 65)."""
_SCORE = """Writes one line for each row, in order: file, line, the text of the time column, the score (above 1 is an
anomaly), and the three metrics that stand out most by their share of the error and by their z-score:
  retraind score today.csv --out scores.csv
Columns are matched by name; others are ignored and named on standard error. A row that can not be
used has no score and the reason instead. Needs torch, numpy and pandas, and pyarrow for Parquet.

Exit status 0: done, anomalies or none; 65: a file does not fit the model; 69: there is no model."""
_CHECK = """Changes nothing. Every problem of the configuration file is listed with its line.

Exit status 0: the service would start; 78: the file has errors; 69: something else is in the way."""
_PREFLIGHT = """Looks at memory, disk, processors, driver and GPU, and says what to do about what is missing. Run it as
the service's user, who may be kept from what root may see. No setting of a GPU is changed.

Exit status 0: all well; 1: with warnings, or a job would go to the CPU since the GPU is not fit for it; 2: a job would
be deferred."""
_STATUS = """Prints the service's own line, the live version, how many files wait, and each fault of the machine
that is being waited out.

Exit status 0: it runs; 69: it does not."""
_JOBS = """Prints the file, the state, the attempts, and the published version or the reason why there is none.
A job's file is in active/ while the job is open, then in done/ or quarantine/."""
_REQUEUE = """Moves the file from quarantine/ to incoming/, where the service finds it as a new dataset, and
removes the reason file. Mend the cause first: raise the limit, or give more memory."""
_HOLD = """A held job is not started until it is released. One that runs is asked to stop at a safe point, goes back
to the queue and loses no attempt. With --all a running job goes on, and files wait in incoming/.

Holds last over restarts. The service obeys within a second, or when it starts, whatever comes first."""
_RELEASE = """The job takes its place in the queue again, with the attempts that it has had. An idle service sees it
within ten seconds."""
_MODELS = """list: dataset, rows, metrics, held-out loss, and the loss of predicting each metric's mean. The live
version is the one that <models.dir>/<models.name>.pt leads to.

show VERSION: what its page, the file report.html beside the weights, says: whether it is better than what was there
before, the rows and metrics that stand out, what the gate looked at, data and training; with --json all that its
manifest says. verify: reads every file of the live version, of VERSION or of all, and compares it with what was
published; exit status 65 when something is damaged or the link leads elsewhere.

rollback: makes VERSION live, or the version that was live before; a second one without VERSION takes the first one
back. The service lets it be, and its next publication becomes live as ever. promote VERSION: makes one live that waits
for it, as all do with gate.policy: manual. pin, unpin: a pinned version is not removed when there are more than
models.keep."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the return value is the exit status. The only place where errors become messages."""
    options = build_parser().parse_args(arguments)
    try:
        return _run(options)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return error.exit_status
    except RetraindError as error:
        print(f"retraind {options.verb}: {error}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        place = f"{printable(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        print(f"retraind {options.verb}: {place}{error.strerror or error}", file=sys.stderr)
        return HostError.exit_status
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    path = options.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    if options.verb == "serve":
        from retraind.supervisor.main import serve

        serve(path)
        return 0
    from retraind import config_file

    config = config_file.load(path)
    match options.verb:
        case "train":
            from retraind.commands.train import train

            return train(_overridden(config, options), _existing(options.files), as_json=options.json)
        case "inspect":
            from retraind.commands.inspect import inspect

            return inspect(config, _existing(options.files), as_json=options.json)
        case "score":
            from retraind.commands.score import score

            return score(config, _existing(options.files), options.model, options.out, options.format)
        case "check":
            from retraind.commands.check import check

            return check(config, path, as_json=options.json)
        case "preflight":
            from retraind.commands.check import preflight

            return preflight(config, as_json=options.json)
        case "models":
            from retraind.commands.models import models

            return models(config, options.action, options.version, every=options.all, as_json=options.json)
        case _:
            return _run_jobs(config, options)


def _run_jobs(config: Config, options: argparse.Namespace) -> int:
    from retraind.commands import hold, jobs

    if options.verb == "status":
        return jobs.status(config, as_json=options.json)
    if options.verb == "jobs":
        return jobs.jobs(config, as_json=options.json, limit=options.limit)
    if options.verb == "hold":
        return hold.hold(config, job_id=options.job, everything=options.all)
    if options.verb == "release":
        return hold.release(config, job_id=options.job, everything=options.all)
    return jobs.requeue(config, job_id=options.job, everything=options.all_quarantined)


def _existing(files: list[Path]) -> list[Path]:
    """The files, links resolved: what a person names on the command line is followed, unlike what lies in the spool."""
    for file in files:
        if not file.exists():
            raise UsageError("not_found", f"{file}: no such file")
    return [file.resolve() for file in files]


def _overridden(config: Config, options: argparse.Namespace) -> Config:
    """The configuration with what the command line says instead, held to the same ranges."""
    given = {"epochs": options.epochs, "batch_size": options.batch_size, "seed": options.seed}
    changes = {key: value for key, value in given.items() if value is not None}
    try:
        training = msgspec.convert(msgspec.to_builtins(config.training) | changes, TrainingConfig)
    except msgspec.ValidationError as error:
        raise UsageError("bad_argument", str(error)) from error
    models = msgspec.structs.replace(config.models, dir=options.models.absolute()) if options.models else config.models
    return msgspec.structs.replace(config, training=training, models=models, device=options.device or config.device)
