"""Shared by the data tests: what a refusal must look like."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import pytest

from dpgrad.data import DataError

# Stands for somebody's record in hostile files: no message may quote it.
SECRET = "s3cret"
T = TypeVar("T")


@contextmanager
def _refused(pattern: str) -> Iterator[None]:
    with pytest.raises(DataError) as caught:
        yield
    message = str(caught.value)
    assert re.search(pattern, message), message
    assert "\n" not in message, "a refusal is one line"
    assert SECRET not in message, "a refusal quotes no row"
    # Neither may a chained exception, which a traceback would print.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def _read_or_refused(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except DataError as error:
        message = str(error)
    assert "\n" not in message, "a refusal is one line"
    return None


@pytest.fixture(scope="session")
def read_or_refused() -> Callable[[Callable[[], T]], T | None]:
    """``read_or_refused(read)`` is what ``read()`` returns, or None where that is one DataError line."""
    return _read_or_refused


@pytest.fixture(scope="session")
def refused() -> Callable[[str], AbstractContextManager[None]]:
    """``with refused(pattern):`` asserts one DataError line that matches and gives nothing away."""
    return _refused
