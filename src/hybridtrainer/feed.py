"""What a run is fed with: the loader, where it stands, and which samples its batches have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtrainer import ranks
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.data.chosen import ChosenLoader, make_loader
from hybridtrainer.data.loader import MapDataset, PositionedLoader
from hybridtrainer.losses import CheckedLoss
from hybridtrainer.predict.samples import SampleForecasts
from hybridtrainer.standing import Standing
from hybridtrainer.state import require_same


class Feed:
    """The data of one run; without a loader of its own it knows nothing, and the position is the caller's.

    Args:
        config: The seed, and whether samples may be left out.
        loss: Whose losses of single samples are listened to.
        say: Told of what people should know.
    """

    def __init__(self, config: HybridTrainerConfig, loss: CheckedLoss, say: Callable[[str], None]) -> None:
        self.samples = SampleForecasts(loss, say, waits=config.predict == "auto", weighs=config.sample_weights)
        self._config = config
        self._loader: PositionedLoader | None = None

    def loader(self, at: Standing, dataset: MapDataset, batch_size: int, **options: Any) -> PositionedLoader:
        """A loader that is part of the run; a position that was loaded before is taken up.

        Of several ranks each gets its part of every batch.

        Raises:
            ForeignCheckpointError: if that position is of other data; then everything is as before.
        """
        predict, gives_all = self._config.predict, ranks.count() > 1 or options.get("keep_partial")
        chances = self.samples.chances if "samples" in predict or (predict == "auto" and not gives_all) else None
        share = (ranks.rank(), ranks.count())
        weighs = self._config.sample_weights
        loader = make_loader(dataset, batch_size, chances, weighs, seed=self._config.seed, share=share, **options)
        if at.data is not None:
            require_same(at.data["identity"], loader.identity(), "The loaded checkpoint")
        self._loader = loader
        if chances is not None:
            self.samples.begin(len(dataset))
        if at.data is None:
            self.note(at)
        self.rewind(at)
        return loader

    def expect(self, batches: int) -> None:
        """A step begins, with so many batches."""
        self.samples.expect(self._loader, batches)

    def left_out(self) -> int | None:
        """Samples that have passed by and were not computed; None where all are given."""
        return self._loader.passed - self._loader.taken if isinstance(self._loader, ChosenLoader) else None

    def note(self, at: Standing) -> None:
        """Takes down where the loader stands."""
        if self._loader is not None:
            at.data = {"position": self._loader.position(), "identity": self._loader.identity()}

    def rewind(self, at: Standing) -> None:
        """Puts the loader where it stood."""
        if self._loader is not None and at.data is not None:
            self._loader.restore(at.data["position"])

    def require_same(self, at: Standing, where: str) -> None:
        """Refuses a position that is of other data.

        Raises:
            ForeignCheckpointError: if it is.
        """
        if self._loader is not None and at.data is not None:
            require_same(at.data["identity"], self._loader.identity(), where)
