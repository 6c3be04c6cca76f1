"""Matrix products in flight."""

from __future__ import annotations

import torch

from .races import RaceError


class Product:
    """A product that was issued: no value to compute with until it is waited for."""

    def __init__(self, a, b, acc, *, use_acc):
        self.accesses = []
        value = self._operand(a).float() @ self._operand(b).float()
        if use_acc:
            value += acc.in_flight if isinstance(acc, Product) else acc
        self.in_flight = value

    def _operand(self, operand):
        if isinstance(operand, torch.Tensor):
            return operand
        value, access = operand.operand()
        self.accesses.append(access)
        return value

    def finish(self, moment):
        for access in self.accesses:
            access.over = moment

    def _refuse(self, *_args, **_kwargs):
        raise RaceError("a product is used that was not waited for")

    __mul__ = __rmul__ = __add__ = __sub__ = _refuse
    amax = sum = to = _refuse

    @classmethod
    def __torch_function__(cls, *_args, **_kwargs):
        raise RaceError("a product is used that was not waited for")


class InFlight:
    """The products of one agent, oldest first."""

    def __init__(self):
        self.products = []

    def issue(self, product):
        self.products.append(product)
        return product

    def wait(self, agent, outstanding, deps):
        """Finish all but the newest `outstanding`; the values of `deps`."""
        done = len(self.products) - outstanding
        moment = agent.step()
        for product in self.products[: max(done, 0)]:
            product.finish(moment)
        self.products = self.products[max(done, 0) :]
        if any(product in self.products for product in deps):
            raise RaceError("a product is used that was not waited for")
        results = tuple(product.in_flight for product in deps)
        return results if len(results) > 1 else results[0]
