"""Backends that end, hang or lie at one head count: the kit must contain them."""

import os
import sys
import time
from dataclasses import replace

from mla_decode.capability import Capability, Feature, Support
from mla_decode.errors import BackendRefused
from mla_decode.reference import ReferenceBackend
from mla_decode.reference.builder import ReferenceMetadataBuilder


class Misbehaving(ReferenceBackend):
    """The reference, but for what happens with several requests of one token."""

    name = "misbehaving"
    fault = "none"

    def _forward(self, call):
        if call.metadata.seq_lens_host == [0, 0]:  # the case empty.all_requests
            if self.fault == "abort":
                os.abort()
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "exit":
                sys.exit(1)
            if self.fault == "os_exit":
                os._exit(1)
        super()._forward(call)


def _make(fault):
    made = Misbehaving()
    made.fault = fault
    return made


abort, hang, leave, os_exit = map(_make, ("abort", "hang", "exit", "os_exit"))


class Unpreparable(ReferenceBackend):
    """A simulator that cannot be installed."""

    name = "unpreparable"

    def prepare_assumed(self, device):
        raise RuntimeError(f"no simulator for {device.arch} today")


class Simulated(ReferenceBackend):
    """A backend that runs where its device is not."""

    name = "simulated_reference"

    def prepare_assumed(self, device):
        return "simulated" if device.torch_device == "cpu" else "nonsense"


class WithoutLse(ReferenceBackend):
    """A backend that declares no lse, and refuses it."""

    name = "without_lse"
    capability = Capability(
        rows=(
            replace(
                ReferenceBackend.capability.row("cpu"),
                features={Feature.PAGE_STRIDE: Support.YES},
            ),
        )
    )

    @property
    def builder_cls(self):
        backend = self

        class Refusing(ReferenceMetadataBuilder):
            def __init__(self, problem, device=None, **kwargs):
                super().__init__(problem, device, **kwargs)
                reasons = backend.refusals(problem, self.device_info)
                if reasons:
                    raise BackendRefused("refused.", {backend.name: reasons})

        return Refusing

    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        return result._replace(lse=None)


without_lse = WithoutLse()
unpreparable, simulated = Unpreparable(), Simulated()
