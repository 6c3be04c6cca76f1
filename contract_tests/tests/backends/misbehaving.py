"""Backends that end, hang or lie at one head count: the kit must contain them."""

import os
import sys
import time

from mla_decode.reference import ReferenceBackend


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


unpreparable, simulated = Unpreparable(), Simulated()
