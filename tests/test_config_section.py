"""What every section of the settings is."""

from __future__ import annotations

import pytest
from pydantic import Field, ValidationError

from hybridtrainer.config_section import Section
from hybridtrainer.errors import ConfigError


class Inner(Section):
    depth: int = Field(default=1, ge=1)


class Outer(Section):
    name: str = "a"
    share: float = Field(default=0.5, le=1)
    inner: Inner = Inner()


def test_all_mistakes_are_told_at_once_those_of_inner_sections_too():
    with pytest.raises(ConfigError) as refused:
        Outer(name=3, share=2.0, inner={"depth": 0, "width": 4})  # type: ignore[arg-type]
    told = str(refused.value)
    assert all(word in told for word in ("name", "share", "inner.depth", "inner.width"))


def test_a_section_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Outer().name = "b"


def test_nothing_is_made_of_something_else():
    with pytest.raises(ConfigError):
        Outer(share="0.5")  # type: ignore[arg-type]
    assert Outer(share=1).share == 1.0
