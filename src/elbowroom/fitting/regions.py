"""Which modules of a model are its regions: the pieces that are checkpointed, each on its own."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from elbowroom.errors import UsageError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

# A class of modules, a qualified name such as "encoder.layers.0", or a glob over names such as "encoder.layers.*".
Choice: TypeAlias = type[nn.Module] | str


class Regions(dict[str, nn.Module]):
    """Regions by their qualified names, in order of definition.

    ``inside``: what was chosen as well but lies inside a region and is part of it, by name: that region's name.
    """

    def __init__(self, regions: dict[str, nn.Module], inside: dict[str, str] | None = None) -> None:
        super().__init__(regions)
        self.inside = inside or {}


def find_regions(model: nn.Module, chosen: Choice | Iterable[Choice] | None = None) -> Regions:
    """The model's regions; a module that has several names (shared) is one region under the first of them.

    Without ``chosen``: the outermost repeated blocks of ``ModuleList``, ``Sequential`` and ``ModuleDict``, however
    deeply nested; if there are none, the direct children; if there are no children, the model itself (named ``""``).
    A block is a module with parts of its own: activations and single layers in a ``Sequential`` are not blocks.

    ``chosen``: a class (its subclasses count), a qualified name or a glob, or several of these, mixed. In a glob,
    ``*`` stands for (a part of) one name between dots, ``**`` for any number of them, also none. A module that cannot
    be called, a ``ModuleList``, stands for its members. Of nested ones the outermost is the region.

    Raises UsageError for a choice that matches nothing, or is none of these.
    """
    if chosen is None:
        found = _repeated_blocks(model, "", _repeated_types(model))
        return _outermost(model, found or _callable_children(model, "") or {"": model})
    choices = [chosen] if isinstance(chosen, (str, type)) or not isinstance(chosen, Iterable) else list(chosen)
    if not choices:
        raise UsageError("regions=[] chooses no region: leave it out, and they are found by structure")
    named = dict(model.named_modules(remove_duplicate=False))
    regions: dict[str, nn.Module] = {}
    for choice in choices:
        for name, module in _matches(choice, named).items():
            members = {name: module} if _has_forward(module) else _callable_children(module, f"{name}.")
            if not members:
                raise UsageError(f"region {name!r} is a {type(module).__name__} without anything to call in it")
            regions.update(members)
    return _outermost(model, regions)


def describe_regions(found: dict[str, nn.Module], model: nn.Module) -> str:
    """What was chosen, in a line: ``12 regions: blocks.0 ... blocks.11 (Block); outside them: embedding, head``."""
    families: dict[str, list[str]] = {}
    for name in found:
        families.setdefault(name.rpartition(".")[0], []).append(name)
    parts = [f"{_span(names)} ({_classes(found[name] for name in names)})" for names in families.values()]
    text = f"{len(found)} region{'' if len(found) == 1 else 's'}: {_several(parts, 6)}"
    if outside := list(_outside(model, "", {id(module) for module in found.values()})):
        text += f"; outside {'it' if len(found) == 1 else 'them'}: {_several(outside, 6)}"
    if inside := getattr(found, "inside", {}):
        inner, outer = next(iter(inside.items()))
        outer = outer or "the model"
        text += f"; {len(inside)} chosen inside others are part of those ({inner} of {outer})"
    return text


# ----------------------------------------------------------------------------------------------------
# Found by structure
# ----------------------------------------------------------------------------------------------------


def _repeated_blocks(module: nn.Module, prefix: str, repeated_types: set[type]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    blocks = {prefix + name: child for name, child in module.named_children() if _is_block(child)}
    repeated = isinstance(module, _CONTAINERS) and _is_repetition(module, blocks, repeated_types)
    for name, child in module.named_children():
        full_name = prefix + name
        inner = _repeated_blocks(child, full_name + ".", repeated_types)
        # A stage (a Sequential of blocks) gives its blocks; any other repeated block is a region as a whole.
        if repeated and full_name in blocks and not (inner and isinstance(child, _CONTAINERS)):
            found[full_name] = child
        else:
            found.update(inner)
    return found


def _is_repetition(container: nn.Module, blocks: dict[str, nn.Module], repeated_types: set[type]) -> bool:
    # A ModuleList of one block is a model of depth one; a Sequential of one block is merely a wrapper, unless the
    # block is repeated elsewhere: a stage that happens to have one.
    least = 1 if isinstance(container, nn.ModuleList) else 2
    counts = Counter(type(block) for block in blocks.values())
    return any(count >= least or kind in repeated_types for kind, count in counts.items())


def _repeated_types(model: nn.Module) -> set[type]:
    """Classes of which the model's containers hold two blocks or more, in whatever container."""
    held = {
        id(child): type(child)
        for container in model.modules()
        if isinstance(container, _CONTAINERS)
        for child in container.children()
        if _is_block(child) and not isinstance(child, _CONTAINERS)
    }
    return {kind for kind, count in Counter(held.values()).items() if count > 1}


def _is_block(module: nn.Module) -> bool:
    return _has_forward(module) and next(module.children(), None) is not None


def _callable_children(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """The direct children; in place of one that cannot be called (a list of modules) its own children."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if _has_forward(child):
            found[prefix + name] = child
        else:
            found.update(_callable_children(child, f"{prefix}{name}."))
    return found


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


# ----------------------------------------------------------------------------------------------------
# Chosen by the user
# ----------------------------------------------------------------------------------------------------


def _matches(choice: object, named: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that one choice means. Raises UsageError if there are none."""
    if isinstance(choice, type) and issubclass(choice, nn.Module):
        found = {name: module for name, module in named.items() if isinstance(module, choice)}
        if not found:
            here = list(dict.fromkeys(type(module).__name__ for module in named.values()))
            near = difflib.get_close_matches(choice.__name__, here, n=3) or here
            raise UsageError(f"regions: no module of this model is a {choice.__name__}; it has {_several(near, 6)}")
        return found
    if not isinstance(choice, str):
        raise UsageError(
            f"regions: {_short(choice)} is neither a class of modules nor a name or glob (or a list of these), such "
            f"as 'encoder.layers.*'"
        )
    if choice in named:  # a name, or "" for the model itself
        return {choice: named[choice]}
    pattern = choice.split(".")
    found = {name: module for name, module in named.items() if name and _matches_glob(name.split("."), pattern)}
    if not found:
        raise UsageError(f"regions: {choice!r} matches no module of this model{_hint(choice, named)}")
    return found


def _short(thing: object) -> str:
    return f"a {type(thing).__name__} object" if isinstance(thing, nn.Module) else repr(thing)


def _matches_glob(parts: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches_glob(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches_glob(parts[1:], pattern[1:])


def _hint(choice: str, named: dict[str, nn.Module]) -> str:
    of_class = [name for name, module in named.items() if type(module).__name__ == choice and name]
    if of_class:
        return f"; it is the class of {_several(of_class, 3)}: give the class itself, or those names"
    deeper = [name for name in named if name and _matches_glob(name.split("."), ["**", *choice.split(".")])]
    if deeper:
        return f"; '**.{choice}' would match {_several(deeper, 3)}"
    near = difflib.get_close_matches(choice, [name for name in named if name], n=3)
    if near:
        return f"; near it: {_several(near, 3)}"
    return f"; it begins with {_several([name for name in named if name and '.' not in name], 6)}"


def _outermost(model: nn.Module, regions: dict[str, nn.Module]) -> Regions:
    """Each module once, in order of definition, without those inside another."""
    first_names = {id(module): name for name, module in model.named_modules()}
    names: dict[int, str] = {}
    for name, module in regions.items():
        names.setdefault(id(module), name)
    # By first name where that one was chosen, too: the order and the names of named_modules().
    names = {i: first if regions.get(first) is not None else names[i] for i, first in first_names.items() if i in names}
    inside: dict[int, str] = {}
    for i, name in names.items():
        if i not in inside:
            for part in regions[name].modules():
                if id(part) in names and id(part) != i:
                    inside.setdefault(id(part), name)
    kept = {name: regions[name] for i, name in names.items() if i not in inside}
    return Regions(kept, {names[i]: outer for i, outer in inside.items()})


# ----------------------------------------------------------------------------------------------------
# Said in words
# ----------------------------------------------------------------------------------------------------


def _span(names: list[str]) -> str:
    if names == [""]:
        return "the model itself"
    if len(names) <= 3:
        return ", ".join(names)
    tails = [name.rpartition(".")[2] for name in names]
    numbers = [int(tail) for tail in tails if tail.isdecimal()]
    if numbers and numbers == list(range(numbers[0], numbers[0] + len(names))):
        return f"{names[0]} ... {names[-1]}"
    return f"{names[0]}, {names[1]} ... {names[-1]}"


def _classes(modules: Iterable[nn.Module]) -> str:
    return _several(list(dict.fromkeys(type(module).__name__ for module in modules)), 3)


def _several(words: list[str], most: int) -> str:
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")


def _outside(module: nn.Module, prefix: str, regions: set[int]) -> Iterator[str]:
    """Names of the outermost modules that neither are nor hold nor lie in a region."""
    if id(module) in regions:
        return
    for name, child in module.named_children():
        if id(child) in regions:
            continue
        if any(id(part) in regions for part in child.modules()):
            yield from _outside(child, f"{prefix}{name}.", regions)
        else:
            yield prefix + name
