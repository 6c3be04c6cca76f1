"""Device integers."""

from __future__ import annotations

import torch


class Scalar(int):
    """A device integer: 32 bits unless widened, and then infectious."""

    wide = False

    def __new__(cls, value, *, wide=False):
        self = super().__new__(cls, value)
        self.wide = wide
        if not wide and not -(2**31) <= int(self) < 2**31:
            raise OverflowError(f"a 32-bit scalar became {int(self)}")
        return self

    def to(self, dtype):
        return Scalar(int(self), wide=dtype == torch.int64)


def _binary(name):
    plain = getattr(int, name)

    def operate(self, other):
        if isinstance(other, torch.Tensor):
            other = other.long() if self.wide else other
            symbol = name.replace("__r", "__") if name.startswith("__r") else name
            if name.startswith("__r"):
                return getattr(other, symbol)(int(self))
            mirrored = {
                "__add__": lambda: other + int(self),
                "__mul__": lambda: other * int(self),
                "__sub__": lambda: int(self) - other,
            }
            return mirrored[name]()
        result = plain(self, other)
        if result is NotImplemented or isinstance(result, bool):
            return result
        wide = self.wide or getattr(other, "wide", False)
        return Scalar(result, wide=wide)

    return operate


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "rshift", "xor"):
    setattr(Scalar, f"__{_name}__", _binary(f"__{_name}__"))
    setattr(Scalar, f"__r{_name}__", _binary(f"__r{_name}__"))
