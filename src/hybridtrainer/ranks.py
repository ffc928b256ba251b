"""The processes of a distributed run, and what they decide together.

Every decision of a run is made by every rank for itself, from values that all of them have: `exchange` gives each what
all others said, in the order of their ranks, so that the same figures give the same decision everywhere. A fault is
shared in the same way: where one rank fails, the others raise too, and nobody waits for somebody who will not come.

What is said travels as JSON over a gloo group of its own, apart from the one that gradients use: it needs no GPU, and
cannot be taken for something else. With one process nothing is sent and nothing is waited for. This module knows
neither models nor training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridtrainer.errors import DivergenceError, RankError
from hybridtrainer.tree import tensor_bytes

LETTER_BYTES = 512  # what fits is sent in one go
LENGTH_BYTES = 8
LOST_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")

T = TypeVar("T")

_known: tuple[Any, Any] | None = None  # the world of torch.distributed, and our group in it


def count() -> int:
    """How many processes train together; 1 where torch.distributed is not in use.

    >>> count(), rank(), exchange("nothing", 3), together("nothing", lambda: 4)
    (1, 0, [3], [4])
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if count() > 1 else 0


def is_first() -> bool:
    """Whether this is the one that writes files and talks to people."""
    return rank() == 0


def exchange(topic: str, value: T) -> list[T]:
    """What every rank says, in the order of their ranks.

    Args:
        topic: What is talked about; all must be at the same point.
        value: Of this rank: numbers, strings, lists and dicts of them.

    Raises:
        RankError: if a rank has failed, cannot be reached within the time-out, or talks about something else.
        torch.OutOfMemoryError: if one has run out of memory, see `together`.
    """
    if count() == 1:
        return [value]
    letters = _send({"topic": topic, "value": value})
    for number, letter in enumerate(letters):
        if "failed" in letter:
            raise _as_told(
                RankError(
                    f"Rank {number} has failed: {letter['failed']} The others have stopped with it.",
                    "Look at what that rank says, then start all of them again from the last checkpoint.",
                )
            )
    topics = [letter["topic"] for letter in letters]
    if len(set(topics)) > 1:
        raise RankError(
            f"The ranks are at different points of the run: {', '.join(topics)}.",
            "Give every rank the same program, configuration and number of batches.",
        )
    for number, letter in enumerate(letters):
        if "memory" in letter:
            raise torch.OutOfMemoryError(f"on rank {number}: {letter['memory']}")
    return [letter["value"] for letter in letters]


def together(topic: str, work: Callable[[], T]) -> list[T]:
    """Does `work` on every rank; what it returned on each, or on none: where one fails, all do.

    Raises:
        torch.OutOfMemoryError: on all ranks, if memory ran out on one; they may all go on with something smaller.
        RankError: on the others, if it raised anything else on one, where that error is raised.
    """
    if count() == 1:
        return [work()]
    try:
        value = work()
    except torch.OutOfMemoryError as error:
        letters = _send({"topic": topic, "memory": str(error)})
        if not any("failed" in letter for letter in letters):
            raise
        raise _as_told(RankError("Another rank has failed.", "Look at what that rank says.")) from error
    except BaseException as error:
        tell(error)
        raise
    return exchange(topic, value)


def each(topic: str, work: Callable[[], T]) -> T:
    """Does `work` on every rank, as `together` does; each gets what it returned itself, which need not be sent."""
    if count() == 1:
        return work()
    made: list[T] = []
    together(topic, lambda: made.append(work()))
    return made[0]


def on_first(topic: str, work: Callable[[], T]) -> T:
    """Does `work` on the first rank alone; all get what it returned, or fail as it does."""
    return together(topic, lambda: work() if is_first() else None)[0]  # type: ignore[return-value]


def require_same(topic: str, value: object, remedy: str) -> None:
    """Refuses to go on where the ranks do not agree.

    Raises:
        RankError: if `value` is not equal on all of them.
    """
    found = exchange(topic, value)
    if any(each != found[0] for each in found):
        shown = "; ".join(f"rank {number}: {str(each)[:100]}" for number, each in enumerate(found))
        raise RankError(f"The ranks differ in {topic} ({shown}).", remedy)


def tell(error: BaseException) -> None:
    """Lets the others know that this rank fails, unless they do already; they raise at their next `exchange`."""
    if count() == 1 or was_told(error) or isinstance(error, RankError):
        return
    text = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        _send({"topic": "failure", "failed": text[:300] + ("" if text.endswith(".") else ".")})
        _as_told(error)
    except RankError as second:  # they have gone before
        error.add_note(f"The other ranks could not be told: {second.what}")


def was_told(error: BaseException) -> bool:
    """Whether all ranks know of this error and have stopped at the same point, so that they may still act together."""
    decided_by_all = isinstance(error, DivergenceError)
    return count() == 1 or decided_by_all or getattr(error, "known_to_all_ranks", False)


def named(error: BaseException) -> BaseException:
    """The error itself; for one of the network between ranks, a `RankError` that says so.

    Gradients and shards travel inside a model's own passes, whose errors are torch's.
    """
    if count() == 1 or not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return error
    text = str(error).lower()
    if not isinstance(error, dist.DistError) and not any(word in text for word in LOST_WORDS):
        return error
    return _lost(error)


def _send(letter: dict[str, Any]) -> list[dict[str, Any]]:
    """One letter to every rank, and theirs to this one."""
    text = json.dumps(letter).encode()
    try:
        found = _gather(len(text).to_bytes(LENGTH_BYTES, "little") + text[: LETTER_BYTES - LENGTH_BYTES], LETTER_BYTES)
        lengths = [int.from_bytes(each[:LENGTH_BYTES], "little") for each in found]
        texts = [each[LENGTH_BYTES : LENGTH_BYTES + length] for each, length in zip(found, lengths, strict=True)]
        if max(lengths) > LETTER_BYTES - LENGTH_BYTES:
            whole = _gather(text, max(lengths))
            texts = [each[:length] for each, length in zip(whole, lengths, strict=True)]
    except RuntimeError as error:
        raise _lost(error) from error
    return [json.loads(each) for each in texts]


def _gather(content: bytes, size: int) -> list[bytes]:
    mine = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
    theirs = [torch.empty_like(mine) for _ in range(count())]
    dist.all_gather(theirs, mine, group=_group())
    return [b"".join(tensor_bytes(each)) for each in theirs]


def _group() -> Any:
    """A group for talk alone, made when it is first needed, with the time-out that the program has chosen."""
    global _known  # noqa: PLW0603  # there is one world, and torch keeps it in a global too
    world = dist.group.WORLD
    if _known is None or _known[0] is not world:
        _known = world, dist.new_group(backend="gloo", timeout=_timeout(world))
    return _known[1]


def _timeout(world: Any) -> timedelta | None:
    """That of the default group; torch's own where it does not say."""
    for device in ("cuda", "cpu"):
        try:
            found = world._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(found, timedelta):
            return found
    return None


def _lost(error: BaseException) -> RankError:
    why = re.sub(r"^\[\S+\] ", "", str(error)).split("\n")[0].split(". ")[0].rstrip(".")[:200]
    return RankError(
        f"Rank {rank()} of {count()} cannot reach the others any more: {why}.",
        "One of them has died or hangs: look at what it says, then start all of them again from the last checkpoint.",
    )


def _as_told(error: T) -> T:
    error.known_to_all_ranks = True  # type: ignore[attr-defined]
    return error
