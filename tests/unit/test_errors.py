"""The error tree: closed sets of codes, one disposition and one exit status per family, one form for people."""

import pytest

from retraind import errors
from retraind.errors import Disposition, RetraindError, worker_error

# Spelt out anew: codes are metric labels and stand in reason files, so a change must be made in two places on purpose.
FAMILIES = {
    errors.ConfigError: (Disposition.STOP, 78, "bad_config"),
    errors.UsageError: (Disposition.STOP, 64, "bad_argument not_found"),
    errors.IntakeError: (Disposition.QUARANTINE, 65, "not_regular vanished"),
    errors.DataError: (
        Disposition.QUARANTINE,
        65,
        (
            "ambiguous_columns empty encoding malformed missing_columns no_numeric no_rows object_dtype shape "
            "too_few_rows too_large too_many_bad_rows too_many_columns too_many_missing truncated "
            "unsupported_format"
        ),
    ),
    errors.DatasetChanged: (Disposition.RETRY, 74, "changed_while_reading"),
    errors.HostError: (
        Disposition.DEFER,
        69,
        (
            "already_running disk_full host_io no_model no_numpy no_torch port_taken preflight_failed spool_unusable "
            "state_unusable unreadable worker_not_started"
        ),
    ),
    errors.ReaderMissing: (Disposition.WAIT, 69, "no_reader"),
    errors.Interrupted: (Disposition.RESUME, 75, "terminated"),
    errors.ResourceError: (Disposition.RETRY_SMALLER, 71, "out_of_memory"),
    errors.TrainingError: (Disposition.RETRY_FLOAT32, 70, "diverged non_finite_loss"),
    errors.WorkerLost: (Disposition.RETRY, 70, "protocol silent timeout worker_crash"),
    errors.PublishError: (
        Disposition.RETRY_PUBLISH,
        73,
        "disk_full locked models_dir_unwritable path_taken sign_failed",
    ),
}
FROM_WORKERS = [(family, code) for family in errors.WORKER_FAMILIES for code in sorted(family.codes)]
# What a machine can do wrong: no dataset is ever blamed for one of these.
OF_THE_MACHINE = (
    errors.HostError.codes | errors.ReaderMissing.codes | errors.PublishError.codes | errors.Interrupted.codes
)


def test_the_tree_is_the_one_that_is_written_down() -> None:
    assert set(RetraindError.__subclasses__()) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_a_family_fixes_disposition_exit_status_and_codes(family: type[RetraindError]) -> None:
    found = (family.disposition, family.exit_status, " ".join(sorted(family.codes)))
    assert found == FAMILIES[family]


def test_a_code_from_outside_the_set_is_a_mistake_in_the_code() -> None:
    with pytest.raises(AssertionError, match="DataError has no code 'spoiled'"):
        errors.DataError("spoiled", "it smells")


@pytest.mark.parametrize(
    ("details", "line"),
    [
        ({}, "malformed: no number: 'x'"),
        ({"line": 3}, "malformed at line 3: no number: 'x'"),
        ({"line": 3, "column": 2}, "malformed at line 3, column 2: no number: 'x'"),
        ({"column": 2}, "malformed at column 2: no number: 'x'"),
        ({"remedy": "look at it"}, "malformed: no number: 'x' (look at it)"),
        ({"line": 1, "column": 1, "remedy": "go"}, "malformed at line 1, column 1: no number: 'x' (go)"),
    ],
)
def test_an_error_is_one_line_with_place_and_remedy(details: dict[str, object], line: str) -> None:
    assert str(errors.DataError("malformed", "no number: 'x'", **details)) == line


@pytest.mark.parametrize(("family", "code"), FROM_WORKERS)
def test_what_a_worker_reports_comes_back_as_the_error_it_raised(family: type[RetraindError], code: str) -> None:
    error = worker_error(code, "why", line=3, column=2, remedy="what to do")
    assert type(error) is family
    assert (error.code, error.message, error.line, error.column, error.remedy) == (code, "why", 3, 2, "what to do")


def test_a_code_that_workers_report_belongs_to_one_family() -> None:
    codes = [code for _, code in FROM_WORKERS]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("code", ["locked", "bad_config", "worker_crash", "spoiled", ""])
def test_a_code_that_no_worker_may_send_is_refused(code: str) -> None:
    with pytest.raises(KeyError):
        worker_error(code, "why")


def test_a_fault_of_the_machine_is_no_reason_for_quarantine() -> None:
    assert OF_THE_MACHINE.isdisjoint(errors.QUARANTINE_CODES)


def test_every_code_that_can_end_in_quarantine_is_a_label() -> None:
    ending = {Disposition.QUARANTINE, Disposition.RETRY, Disposition.RETRY_SMALLER, Disposition.RETRY_FLOAT32}
    codes = {code for family in FAMILIES if family.disposition in ending for code in family.codes}
    assert tuple(sorted(codes)) == errors.QUARANTINE_CODES
