"""Flower without what a client never calls.

These are errors of HTTP servers, for which Flower imports FastAPI, and httpx's own command line, which imports rich and
pygments. They take half as long to import as the rest of Flower.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_servers() -> Iterator[None]:
    """Import Flower's client inside. Until the end, empty modules stand in for those that are not imported yet."""
    errors, catalog = ModuleType("flwr.supercore.error.http"), ModuleType("flwr.supercore.error.catalog")
    vars(errors).update(BearerAuthenticationError=None, http_error_translator=None)
    vars(catalog).update(API_ERROR_MAP={}, ApiErrorSpec=None)
    stand_ins = {errors.__name__: errors, catalog.__name__: catalog, "httpx._main": None}
    absent = [name for name in stand_ins if name not in sys.modules]
    sys.modules.update({name: stand_ins[name] for name in absent})  # type: ignore[misc]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
