"""Which modules of a model are its regions: the pieces that are checkpointed, each on its own."""

from __future__ import annotations

from collections import Counter

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_regions(model: nn.Module) -> dict[str, nn.Module]:
    """The model's regions by their qualified names, in order of definition.

    The outermost repeated blocks of ``ModuleList``, ``Sequential`` and ``ModuleDict``, however deeply
    nested; if there are none, the direct children; if there are no children, the model itself (named ``""``).
    A block is a module with parts of its own: activations and single layers in a ``Sequential`` are not
    blocks.
    """
    regions = _repeated_blocks(model, "") or _callable_children(model, "") or {"": model}
    unique: dict[int, str] = {}
    for name, module in regions.items():
        unique.setdefault(id(module), name)
    return {name: regions[name] for name in unique.values()}


def _repeated_blocks(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    blocks = {prefix + name: child for name, child in module.named_children() if _is_block(child)}
    repeated = isinstance(module, _CONTAINERS) and _is_repetition(module, blocks)
    for name, child in module.named_children():
        full_name = prefix + name
        inner = _repeated_blocks(child, full_name + ".")
        # A stage (a Sequential of blocks) gives its blocks; any other repeated block is a region as a whole.
        if repeated and full_name in blocks and not (inner and isinstance(child, _CONTAINERS)):
            found[full_name] = child
        else:
            found.update(inner)
    return found


def _is_repetition(container: nn.Module, blocks: dict[str, nn.Module]) -> bool:
    # A ModuleList of one block is a model of depth one; a Sequential of one block is merely a wrapper.
    least = 1 if isinstance(container, nn.ModuleList) else 2
    return any(count >= least for count in Counter(type(block) for block in blocks.values()).values())


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
