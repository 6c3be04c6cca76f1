"""A backend's answers about one device, its facts read once: what a planner asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mla_decode.backend import Backend, Cost
    from mla_decode.capability import IntSet
    from mla_decode.device import DeviceInfo
    from mla_decode.mask import Mask
    from mla_decode.problem import DecodeProblem
    from mla_decode.refusal import Refusal


class Answers(Protocol):
    """What a backend says of any problem on one device, at one moment.

    Plans are cached by problem and answers. A backend whose answers depend on more than
    the device, such as the environment or the installed library, has a method
    ``answers(device)`` that reads those once, and that returns unequal answers after
    they changed.
    """

    def __hash__(self) -> int:
        """Equal answers give equal plans."""

    @property
    def num_q_heads(self) -> IntSet:
        """Head counts that the device's row admits; empty where it has no row."""

    def refusals(self, problem: DecodeProblem) -> Sequence[Refusal]:
        """As `Backend.refusals`."""

    def cost(self, problem: DecodeProblem) -> Cost:
        """As `Backend.cost`."""

    def fewest_walks(
        self, problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: int
    ) -> int | None:
        """A lower bound of the KV walks of one block, cheap enough to ask first.

        Args:
            problem: Gives dtypes, page size and features; its blocks, heads and batch
                sizes do not count.
            query_len: Tokens of the block.
            mask: CAUSAL where the block has one token.
            num_q_heads: Its heads.

        Returns:
            No more than `cost` would say of any accepted problem with this block. None:
            `refusals` accepts no such problem.
        """

    def least_bytes(
        self,
        problem: DecodeProblem,
        query_len: int,
        mask: Mask,
        num_q_heads: int,
        num_reqs: int,
    ) -> int:
        """A lower bound of a block's memory; asked where `fewest_walks` gives a number.

        Args:
            problem: As there.
            query_len: As there.
            mask: As there.
            num_q_heads: As there.
            num_reqs: Most requests of a batch.

        Returns:
            No more than `cost` would say of any accepted problem with this block and
            this `max_num_reqs`: workspace_bytes and call_bytes together.
        """


@dataclass(frozen=True, kw_only=True)
class PlainAnswers:
    """The answers of a backend that depend on the device alone."""

    backend: Backend
    device: DeviceInfo

    @property
    def num_q_heads(self) -> IntSet:
        """The row's, or none."""
        row = self.backend.capability.row(self.device.arch)
        return frozenset[int]() if row is None else row.num_q_heads

    def refusals(self, problem: DecodeProblem) -> Sequence[Refusal]:
        """The backend's."""
        return self.backend.refusals(problem, self.device)

    def cost(self, problem: DecodeProblem) -> Cost:
        """The backend's."""
        return self.backend.cost(problem, self.device)

    def fewest_walks(
        self, problem: DecodeProblem, query_len: int, mask: Mask, num_q_heads: int
    ) -> int | None:
        """One: every kernel reads the KV."""
        del problem, query_len, mask, num_q_heads
        return 1

    def least_bytes(
        self,
        problem: DecodeProblem,
        query_len: int,
        mask: Mask,
        num_q_heads: int,
        num_reqs: int,
    ) -> int:
        """None that is known."""
        del problem, query_len, mask, num_q_heads, num_reqs
        return 0


def answers_of(backend: Backend, device: DeviceInfo) -> Answers:
    """A backend's own answers where it has some, else those of the device alone."""
    own: Callable[[DeviceInfo], Any] | None = getattr(backend, "answers", None)
    if own is None:
        return PlainAnswers(backend=backend, device=device)
    return cast("Answers", own(device))
