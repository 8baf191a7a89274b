"""Commands that run in the tests' own process leave its environment as it was."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def environment_of_one_test() -> Iterator[None]:
    """A command says in the environment which process it is; the next test must not believe it."""
    with mock.patch.dict(os.environ):
        yield
