"""The few PTX instructions of the kernels' inline assembly, on 32-bit words."""

from __future__ import annotations

import re

import torch


def run_packed(assembly, elements, dtype):
    """Inline assembly of one argument, elements of a word, to a 16-bit type.

    Neighbours along the last axis share a word, which is what a layout that gives each
    thread a multiple of so many neighbours means. Results are the words that come before
    the argument: two for four 8-bit elements, one for two 16-bit ones.
    """
    words = elements.contiguous().view(torch.uint8).view(torch.int32).long()
    names = ["$0", "$1", "$2"][: 4 // elements.itemsize // 2 + 1]
    registers = {names.pop(): words & 0xFFFFFFFF}
    for line in assembly.replace("{\n", "").replace("}\n", "").split(";"):
        name, _, operands = line.strip().partition(" ")
        if name and not name.startswith(".reg"):
            _execute(name, operands, registers)
    halves = _halves(torch.stack([registers[name] for name in names], -1))
    return halves.to(torch.int16).view(dtype).reshape(elements.shape)


def _execute(name, operands, registers):
    target, *sources = re.findall(r"\{.*?\}|[^\s,]+", operands)
    values = [_value(source, registers) for source in sources]
    if target.startswith("{"):
        parts = _halves(values[0]).unbind(-1)
        registers.update(zip(re.findall(r"\w+", target), parts, strict=True))
    else:
        registers[target] = _OPERATIONS[name](*values)


def _value(source, registers):
    return registers[source] if source in registers else torch.tensor(int(source, 0))


def _halves(words):
    """[..., 2]: the low and the high half of every word."""
    return torch.stack((words & 0xFFFF, words >> 16), -1)


def _join(halves):
    low, high = (halves.long() & 0xFFFF).unbind(-1)
    return low | high << 16


def _permute(a, b, selector):
    joined = a | b << 32
    result = torch.zeros_like(a)
    for place in range(4):
        nibble = int(selector) >> 4 * place & 15
        byte = joined >> 8 * (nibble & 7) & 255
        if nibble & 8:
            byte = torch.where(byte > 127, 255, 0)
        result |= byte << 8 * place
    return result


def _multiply(a, b):
    a, b = (_halves(x).to(torch.int16).view(torch.bfloat16) for x in (a, b))
    return _join((a.double() * b.double()).bfloat16().view(torch.int16))


def _convert(pair):
    codes = torch.stack((pair & 255, pair >> 8), -1).to(torch.uint8)
    return _join(codes.view(torch.float8_e4m3fn).half().view(torch.int16))


_OPERATIONS = {
    "mov.b32": lambda x: x,
    "prmt.b32": _permute,
    "shl.b32": lambda x, n: x << n & 0xFFFFFFFF,
    "and.b32": lambda x, y: x & y,
    "mul.bf16x2": _multiply,
    "cvt.rn.f16x2.e4m3x2": _convert,
}
