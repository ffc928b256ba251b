"""What every section of the settings is: immutable, strict, and refused with all of its mistakes at once."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hybridtrainer.config_problems import problems_of
from hybridtrainer.errors import ConfigError


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions, no NaN.

    Raises:
        ConfigError: with every mistake in what a section is made of, where it is made in Python.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(type(self).__name__, problems_of(error.errors(), type(self))) from None

    # Sections inside another are then made without it, and their mistakes are told with those of the others.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]
