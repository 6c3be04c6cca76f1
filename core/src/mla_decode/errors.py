"""Every error of the contract: each carries what was asked, what is allowed, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from mla_decode.refusal import Refusal


class ContractError(Exception):
    """Base of all errors that this library raises for its callers' input.

    Attributes:
        got: What was asked or passed.
        allowed: What would have been accepted.
        fix: What the reader can do.
    """

    def __init__(self, message: str, *, got: str, allowed: str, fix: str) -> None:
        super().__init__(message, got, allowed, fix)
        self.message = message
        self.got = got
        self.allowed = allowed
        self.fix = fix

    def __reduce__(self) -> tuple[Callable[..., ContractError], tuple[object, ...]]:
        """Pickle with all data: engines raise in one process and read in another."""
        return _restore, (type(self), self.args, self.__dict__.copy())

    def __str__(self) -> str:
        """What happened, what was asked, what is allowed, what to do."""
        return (
            f"{self.message} Got: {self.got}. Allowed: {self.allowed}. Fix: {self.fix}."
        )


def _restore(
    cls: type[ContractError], args: tuple[object, ...], state: dict[str, object]
) -> ContractError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class MaskError(ContractError, ValueError):
    """A causal flag that names no mask, or more than one."""


class BatchError(ContractError, ValueError):
    """A batch whose shape, lengths or tables break the contract."""


class ArgumentError(ContractError, ValueError):
    """A tensor, scale or option of a call that breaks the contract."""


class StaleMetadataError(ContractError, RuntimeError):
    """Metadata used after a later build, or with another geometry than its own."""


class OutdatedLibraryError(ContractError, RuntimeError):
    """The installed kernel library is too old for the request and a newer one is not.

    Attributes:
        library: Distribution name of the library, such as ``amd-aiter``.
        installed: Its installed version.
        first_supported: The first version that serves the request.
    """

    def __init__(
        self, message: str, *, library: str, installed: str, first_supported: str
    ) -> None:
        super().__init__(
            message,
            got=f"{library} {installed}",
            allowed=f"{library} {first_supported} or newer",
            fix=(
                f"upgrade {library} to {first_supported} or newer, or name another "
                'backend explicitly, or opt in to lowering="exact"'
            ),
        )
        self.library = library
        self.installed = installed
        self.first_supported = first_supported


class BackendRefused(ContractError, ValueError):  # noqa: N818 - the contract's name
    """No backend, or not the one asked for, serves the problem.

    Attributes:
        refused: Every reason, by backend name, in the order in which they were asked.
        refusals: The same reasons in one tuple.
    """

    def __init__(
        self, what: str, refused: Mapping[str, Iterable[Refusal]], *, got: str = ""
    ) -> None:
        self.refused: dict[str, tuple[Refusal, ...]] = {
            name: tuple(reasons) for name, reasons in refused.items()
        }
        self.refusals: tuple[Refusal, ...] = tuple(
            reason for reasons in self.refused.values() for reason in reasons
        )
        super().__init__(
            what,
            got=got or "; ".join(dict.fromkeys(r.got for r in self.refusals)),
            allowed="; ".join(dict.fromkeys(r.allowed for r in self.refusals)),
            fix="; ".join(dict.fromkeys(r.fix for r in self.refusals)),
        )

    def __str__(self) -> str:
        """The request, then each backend's reasons, a line each."""
        lines = [
            f"  {name}: {reason}"
            for name, reasons in self.refused.items()
            for reason in reasons
        ]
        return "\n".join([self.message, *lines])

    @property
    def codes(self) -> frozenset[str]:
        """The codes of all reasons."""
        return frozenset(str(reason.code) for reason in self.refusals)
