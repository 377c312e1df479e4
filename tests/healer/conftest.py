"""The limits of `tests/runtime` hold here too."""

from tests.runtime.conftest import unlimited as unlimited
