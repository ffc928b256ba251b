"""All rehearsals of one model with one batch, each made when it is first asked for and kept.

They do not depend on the card: plans for many cards share them.
"""

from __future__ import annotations

import math

from torch import nn

from hybridtrainer.blocks import find_blocks
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ConfigError, ModelError
from hybridtrainer.kernels.formats import Mode
from hybridtrainer.losses import LossFunction
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.asked import batch_problems
from hybridtrainer.planning.pieces import Pieces, rehearse_pieces, with_mode
from hybridtrainer.planning.resident import ResidentStep, rehearse_resident
from hybridtrainer.planning.sources import load_without_memory, remarks_on

MOST_PARTS = 64
MOST_PARAMETERS = 2 * 10**12  # the states of each block are counted in portions of 64 MiB


class Rehearsals:
    """What the steps of a decoder take, whichever way it is trained.

    Args:
        model: A decoder whose forward takes tokens; a name such as "llama-7b", or a config.json of Hugging Face.
        tokens: In one step, over all sequences.
        context: Tokens in one sequence.
        accumulate: Micro-batches in a step of a resident model; a streamed one divides a batch inside its blocks.
        loss: What the model is trained with.
        streamed_loss: What it is trained with where it is streamed, if that is another.

    Raises:
        ConfigError: for sizes that make no sense.
        ModelError: for a model that is not known, has no repeated blocks or is larger than any.

    >>> rehearsals = Rehearsals("gpt2-124m", tokens=4096, context=512)
    >>> rehearsals.resident("bf16", 1).spent.peak_bytes < rehearsals.resident("bf16", 0).spent.peak_bytes
    True
    """

    def __init__(
        self,
        model: nn.Module | str,
        tokens: int,
        context: int,
        accumulate: int = 1,
        loss: LossFunction = language_loss,
        streamed_loss: LossFunction | None = None,
    ) -> None:
        problems = batch_problems(tokens, context, accumulate)
        if problems:
            raise ConfigError("the batch", problems, "Give sizes such as --tokens 16384 --seq 2048 --accumulate 2.")
        self.model = load_without_memory(model, context) if isinstance(model, str) else model
        if not isinstance(self.model, nn.Module):
            raise ModelError(f"The model is a {type(model).__name__}, not an nn.Module.", "Give a decoder or its name.")
        find_blocks(self.model)
        self.remarks = remarks_on(model, self.model) if isinstance(model, str) else ()
        self.tokens, self.context, self.accumulate = tokens, context, accumulate
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        if self.parameters > MOST_PARAMETERS:
            known, most = (f"{number / 1e9:,.0f} billion" for number in (self.parameters, MOST_PARAMETERS))
            raise ModelError(
                f"The model has {known} parameters, more than the {most} that can be planned for.",
                "Look whether its sizes are right.",
            )
        self._loss, self._streamed_loss = loss, streamed_loss or loss
        self._resident: dict[tuple[str, int, str, bool], ResidentStep] = {}
        self._pieces: dict[tuple[int, str], Pieces] = {}

    @property
    def trained_bytes(self) -> int:
        """Of the parameters that are trained."""
        return sum(each.nbytes for each in self.model.parameters() if each.requires_grad)

    @property
    def samples(self) -> int:
        """Sequences in a step."""
        return self.tokens // self.context

    def halved(self) -> Rehearsals:
        """Those of the same model with half the sequences in a step, or with half as long a one where there is one."""
        samples, context = (self.samples // 2, self.context) if self.samples > 1 else (1, self.context // 2)
        parts = math.gcd(self.accumulate, samples)
        return Rehearsals(self.model, samples * context, context, parts, self._loss, self._streamed_loss)

    def splits(self) -> list[int]:
        """Divisions of a batch inside a block: 1, 2, 4 and so on, up to one sample at a time."""
        most = min(self.samples, MOST_PARTS)
        return [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]

    def resident(
        self, precision: str, checkpoint_every: int, keep: str = "inputs", offload: bool = False
    ) -> ResidentStep:
        """A step of the model as it is."""
        key = precision, checkpoint_every, keep, offload
        if key not in self._resident:
            memory = MemoryConfig.model_validate(
                {
                    "precision": precision,
                    "checkpoint_every": checkpoint_every,
                    "checkpoint_keep": keep,
                    "offload_activations": offload,
                }
            )
            alike = (step for (known, *_), step in self._resident.items() if known == precision)
            probe = next((step.probe for step in alike), None)
            self._resident[key] = rehearse_resident(
                self.model, memory, self.samples // self.accumulate, self.context, self.accumulate, self._loss, probe
            )
        return self._resident[key]

    def streamed(self, mode: Mode, split: int, precision: str = "fp32") -> Pieces:
        """The pieces of a streamed step, in any mode of 16-bit weights."""
        key = split, precision
        if key not in self._pieces:
            known = next(iter(self._pieces.values()), None)
            self._pieces[key] = rehearse_pieces(
                self.model, mode, self.samples, self.context, split, known, precision, self._streamed_loss
            )
        return with_mode(self._pieces[key], self.model, mode)
