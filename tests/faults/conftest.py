"""The invariants explain themselves: their asserts are rewritten like those of a test."""

import pytest

pytest.register_assert_rewrite("invariants")
