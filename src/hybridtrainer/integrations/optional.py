"""Packages that are needed only by whoever uses them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hybridtrainer.errors import MissingPackageError


def require(package: str, extra: str) -> Any:
    """Imports a package that an extra brings.

    Args:
        package: To import.
        extra: Of this project, which lists it.

    Raises:
        MissingPackageError: if it, or something that it needs, is not installed.

    >>> require("json", "hf").__name__
    'json'
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingPackageError(
            f"The package {error.name or package} is not installed, and {package} is needed for this.",
            f'Install it with `pip install ".[{extra}]"` in the clone; everything else works without it.',
        ) from error
