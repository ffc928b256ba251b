"""What a comparison is: its arms, its grid, its data. Nothing else may be mixed into its folder.

Seeds, target, metric and tolerance may change from call to call: they need no trial to be made again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hybridtrainer.compare.arms import Arm, differences
from hybridtrainer.compare.options import Grid
from hybridtrainer.errors import DataError, RunFolderError
from hybridtrainer.run_folder import RunFolder

VERSION = 1
FILE = "compare.json"


class Identity:
    """The identity of a comparison, kept in `compare.json` from the moment its data were first read.

    Raises:
        RunFolderError: if the folder holds another comparison. Nothing has been written then.
    """

    def __init__(self, kept: RunFolder, arms: Sequence[Arm], grid: Grid | None) -> None:
        self._kept = kept
        self._data: str | None = None
        plain_grid = None if grid is None else {key: list(value) for key, value in vars(grid).items()}
        self._ours = {"v": VERSION, "arms": {arm.name: arm.settings() for arm in arms}, "grid": plain_grid}
        path = kept.path / FILE
        if not path.exists():
            return
        known = self._read()
        self._data = str(known.pop("data", ""))
        if other := differences(known, json.loads(json.dumps(self._ours))):
            more = f", and {len(other) - 1} more differ" if len(other) > 1 else ""
            raise RunFolderError(
                f"{kept.path} holds another comparison: {_told(*other[0])}{more}.",
                "Give this one another name with --run.",
            )

    def accept_data(self, arm: str, digest: str) -> None:
        """Every arm must have the data with which the comparison was begun.

        Raises:
            DataError: if this one does not.
        """
        if self._data is None:
            self._data = digest
            self._kept.write_json(FILE, self._ours | {"data": digest})
        if digest != self._data:
            raise DataError(
                f"The data of the arm {arm} are not those with which this comparison was begun.",
                "Give all arms the same data, put changed data back, or begin another comparison with --run.",
            )

    def _read(self) -> dict[str, Any]:
        path = self._kept.path / FILE
        try:
            known = json.loads(path.read_text())
        except ValueError as error:
            raise RunFolderError(f"{path} is damaged.", "Begin the comparison anew under another name.") from error
        if not isinstance(known, dict):
            raise RunFolderError(f"{path} is damaged.", "Begin the comparison anew under another name.")
        return known


def _told(where: str, kept: object, asked: object) -> str:
    """One difference in words; an arm or a grid that only one of the two has is not shown whole."""
    if kept is None or asked is None:
        return f"{'this one' if kept is None else 'that one'} has {where}, and the other has not"
    return f"{where} is {kept} there and {asked} here"
