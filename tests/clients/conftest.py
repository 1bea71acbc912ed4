"""The fleet ends with the last test of its group, which may be one of these."""

from tests.fleet.keeping import pytest_runtest_teardown as pytest_runtest_teardown
from tests.fleet.keeping import pytest_sessionfinish as pytest_sessionfinish
