"""A kernel's own source, its names bound to the simulator's."""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import inspect
import sys
import types

from .language import World
from .races import SimulationError


@functools.cache
def source_tree(module):
    """The syntax tree of a module of kernels; not to be changed."""
    return ast.parse(inspect.getsource(module))


@functools.lru_cache(maxsize=64)
def _code(function):
    """The code of a function, without its decorators."""
    bare = ast.FunctionDef(**{**dict(ast.iter_fields(function)), "decorator_list": []})
    module = ast.fix_missing_locations(ast.Module([bare], []))
    unevaluated = __future__.annotations.compiler_flag
    return compile(module, f"<simulated {function.name}>", "exec", unevaluated)


class Binder:
    """Namespaces of Gluon modules for one world, those that they import included.

    Args:
        world: What the names of the language mean.
        trees: Syntax trees by module name that stand in for a module's own.
    """

    def __init__(self, world, trees):
        self.world = world
        self.trees = trees
        self.bound = {}

    def bind(self, module):
        """A module's names."""
        if module.__name__ in self.bound:
            return self.bound[module.__name__]
        names = self.bound[module.__name__] = {"__builtins__": builtins}
        tree = self.trees.get(module.__name__)
        for name, value in vars(module).items():
            source = getattr(value, "fn", None)
            if isinstance(source, types.FunctionType):
                self._bind_function(module, name, source, names, tree)
            elif hasattr(value, "__triton_aggregate__"):
                names[name] = functools.partial(_bundle, value)
            elif type(value).__name__ == "constexpr":
                names[name] = value.value
            elif not name.startswith("__") and hasattr(type(self.world), name):
                names[name] = getattr(self.world, name)
        names.update(gl=self.world, mbarrier=self.world, range=self.world.range)
        return names

    def _bind_function(self, module, name, source, names, tree):
        owner = source.__module__
        if owner != module.__name__:
            names[name] = self.bind(sys.modules[owner])[source.__name__]
        elif tree is None:
            names[name] = types.FunctionType(
                source.__code__, names, name, source.__defaults__
            )
        else:
            exec(_code(_find(tree, source.__name__)), names)  # noqa: S102 - our source


def _bundle(aggregate, *values):
    """An object of an aggregate's fields, made by its own constructor."""
    made = types.SimpleNamespace()
    init = aggregate.hash_attrs[0]
    getattr(init, "fn", init)(made, *values)
    return made


def _find(tree, name):
    return next(n for n in tree.body if getattr(n, "name", None) == name)


def run(module, kernel, grid, arguments, *, seed=0, trees=None):
    """Execute a module's Gluon kernel over a grid, one program after the other.

    Where an argument is late, every program waits for the kernel before it: whoever
    comes after this kernel takes that one to be over too.
    """
    is_late = any(getattr(value, "is_late", False) for value in arguments.values())
    for y in range(grid[1]):
        for x in range(grid[0]):
            world = World((x, y, 0), (*grid, 1), seed + 1000 * y + x)
            Binder(world, trees or {}).bind(module)[kernel](**arguments)
            if is_late and not world.has_waited:
                raise SimulationError("a program ends before the kernel before it")
