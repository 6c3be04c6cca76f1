"""Faults, one at a time, in everything that orders the kernels: made from the source."""

import ast
import copy
from dataclasses import dataclass

from hopper_simulator import source_tree

MEETING = ("give", "take", "give_both", "take_both")
ORDERING = (
    "wait",
    "signal",
    "arrive",
    "expect",
    "fence_async_shared",
    "barrier",
    *MEETING,
)
TOUCHING = (
    *ORDERING,
    "async_load",
    "load_columns",
    "load_queries",
    "warpgroup_mma",
    "warpgroup_mma_wait",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mutant:
    """A module's tree with one fault in it; what has none is shared."""

    module: str
    name: str
    """What was changed and how; the same while the source is the same."""
    tree: ast.Module

    @property
    def trees(self):
        return {self.module: self.tree}


def mutants(module):
    """Every mutant of a module of kernels."""
    tree = source_tree(module)
    short = module.__name__.rpartition(".")[2]
    for place, function in enumerate(tree.body):
        if isinstance(function, ast.FunctionDef):
            for name, changed in _mutants_of(function):
                body = [*tree.body[:place], changed, *tree.body[place + 1 :]]
                yield Mutant(
                    module=module.__name__,
                    name=f"{short}.{function.name}: {name}",
                    tree=ast.Module(body, []),
                )


def _mutants_of(function):
    seen = {}
    for position, node in enumerate(ast.walk(function)):
        for kind, change in _changes(function, node):
            text = ast.unparse(node)
            nth = seen[text, kind] = seen.get((text, kind), 0) + 1
            changed = copy.deepcopy(function)
            twin = next(n for i, n in enumerate(ast.walk(changed)) if i == position)
            change(changed, twin)
            ast.fix_missing_locations(changed)
            yield f"{text} #{nth} {kind}" if nth > 1 else f"{text} {kind}", changed


def _changes(function, node):
    """Kinds of faults that a node can have, and what makes each."""
    if isinstance(node, ast.Expr) and _called(node.value) in ORDERING:
        yield "removed", _remove
        if _next_touches_memory(function, node):
            yield "swapped with the next", _swap_with_next
    name = _called(node)
    if name == "wait":
        yield "of the other parity", _flip(1)
    elif name == "expect":
        yield "of fewer bytes", _add(1, -128)
        yield "of more bytes", _add(1, 128)
    elif name in MEETING:
        yield from _changes_of_meeting(name)
    elif name == "index" and not isinstance(node.args[0], ast.Constant):
        if function.name.endswith("_kernel"):
            return  # barriers are initialised in any order
        yield "of the other stage", _flip(0)
    elif name == "warpgroup_mma_wait":
        yield "for one fewer", _add(0, 1)
    elif name == "init":
        yield "with another count", _recount


def _changes_of_meeting(name):
    yield "of the other pair", _add(0, 2)
    yield "of fewer threads", _add(1, -32)
    yield "of more threads", _add(1, 32)
    if not name.endswith("_both"):
        yield "of the other stage", _flip(0)
    if name == "take":
        yield "without waiting", _arrive_instead


def _called(node):
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def _blocks(tree):
    for node in ast.walk(tree):
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def _next_touches_memory(tree, node):
    """Whether the statement after one does more than compute and write results."""
    block = next(block for block in _blocks(tree) if node in block)
    after = block[block.index(node) + 1 :][:1]
    calls = [n for n in ast.walk(ast.Module(after, [])) if isinstance(n, ast.Call)]
    return any(
        _called(c) in TOUCHING
        or (_called(c) in {"load", "store"} and ast.unparse(c.func.value) != "gl")
        for c in calls
    )


def _remove(tree, node):
    for block in _blocks(tree):
        if node in block:
            block[block.index(node)] = ast.copy_location(ast.Pass(), node)


def _swap_with_next(tree, node):
    for block in _blocks(tree):
        if node in block:
            i = block.index(node)
            block[i : i + 2] = reversed(block[i : i + 2])


def _flip(argument):
    def change(_tree, call):
        old = call.args[argument]
        call.args[argument] = ast.BinOp(old, ast.BitXor(), ast.Constant(1))

    return change


def _add(argument, amount):
    def change(_tree, call):
        old = call.args[argument]
        call.args[argument] = ast.BinOp(old, ast.Add(), ast.Constant(amount))

    return change


def _recount(_tree, call):
    call.keywords[0].value = ast.Constant(2)


def _arrive_instead(_tree, call):
    """Call the language itself: not every module that takes also gives."""
    number, threads = (ast.unparse(argument) for argument in call.args)
    arrival = ast.parse(
        f"gl.inline_asm_elementwise('bar.arrive $1, $2;', '', [{number}, {threads}],"
        " dtype=None, is_pure=False, pack=1)",
        mode="eval",
    ).body
    call.func, call.args, call.keywords = arrival.func, arrival.args, arrival.keywords
