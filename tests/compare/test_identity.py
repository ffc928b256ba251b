"""What a comparison is, and what is refused as another one."""

from __future__ import annotations

import pytest
from tests.compare.support import arm

from hybridtrainer.compare.identity import FILE, Identity
from hybridtrainer.compare.options import Grid
from hybridtrainer.errors import DataError, RunFolderError
from hybridtrainer.run_folder import RunFolder

ARMS = [arm("plain", "baseline"), arm("other")]


@pytest.fixture
def kept(tmp_path):
    with RunFolder(tmp_path / "c", 1, resume=True) as folder:
        yield folder


def test_it_is_kept_from_the_moment_the_data_are_known(kept):
    identity = Identity(kept, ARMS, None)
    assert not (kept.path / FILE).exists()
    identity.accept_data("plain", "abc")
    assert (kept.path / FILE).exists()
    Identity(kept, ARMS, None).accept_data("other", "abc")
    with pytest.raises(DataError, match="data of the arm other"):
        Identity(kept, ARMS, None).accept_data("other", "xyz")


@pytest.mark.parametrize(
    ("arms", "grid", "first"),
    [
        (ARMS[:1], None, "that one has arms.other, and the other has not."),
        (
            [ARMS[0], arm("other", optimizer={"lr": 0.5})],
            None,
            "arms.other.optimizer.lr is 0.01 there and 0.5 here, and",
        ),
        (ARMS, Grid(), "this one has grid, and the other has not."),
    ],
)
def test_other_arms_or_another_grid_are_refused_with_the_first_difference(kept, arms, grid, first):
    Identity(kept, ARMS, None).accept_data("plain", "abc")
    with pytest.raises(RunFolderError, match=f"holds another comparison: {first}"):
        Identity(kept, arms, grid)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_damaged_file_is_said(kept, text):
    (kept.path / FILE).write_text(text)
    with pytest.raises(RunFolderError, match="damaged"):
        Identity(kept, ARMS, None)
