"""The table of changes that break an invariant is of this code, and has a change for each invariant's test."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutations import MUTATIONS, Mutation


def named_in_invariants() -> set[str]:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    section = text.partition("## Invariants")[2].partition("\n## ")[0]
    return set(re.findall(r"`(tests/[^`]+::\w+)`", section))


def test_each_invariants_test_has_a_change_that_it_is_to_find() -> None:
    assert {mutation.test for mutation in MUTATIONS} == named_in_invariants()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.path}-{mutation.what}")
def test_a_change_is_one_of_this_code(mutation: Mutation) -> None:
    source = (ROOT / "daemon" / "retraind" / mutation.path).read_text()
    assert source.count(mutation.old) == 1
    assert mutation.new != mutation.old
    compile(source.replace(mutation.old, mutation.new), mutation.path, "exec")
