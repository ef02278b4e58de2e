"""The public verbs: checkpoint, wrap, unwrap, name, saved, proof, replayable."""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from elbowroom.core import drafting
from elbowroom.core.policies import from_names, key_of, to_names
from elbowroom.core.recorder import recorders
from elbowroom.core.region import Region, family_of, under_compile
from elbowroom.errors import UsageError

M = TypeVar("M", bound=Module)

#: Keywords of torch.utils.checkpoint that replay makes moot: nothing is run again, so nothing is set up for it.
MOOT = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")

#: Settings remembered for one callable; the oldest are forgotten.
MAX_SETTINGS = 64

_regions: weakref.WeakKeyDictionary[Any, dict[Any, Region]] = weakref.WeakKeyDictionary()


def checkpoint(fn: Any = None, *args: Any, keep: Any = None, verify: str = "first", **kwargs: Any) -> Any:
    """Run ``fn(*args, **kwargs)`` once, keep little of it, and replay what backward asks for.

    A drop-in for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``: same outputs, and gradients that are
    those of a plain call bit for bit. Torch's other keywords are accepted; replay makes them moot, unless ``fn`` itself
    takes a keyword of that name, which then gets it. For a keyword of ``fn`` called ``keep`` or ``verify`` use
    ``functools.partial``.

    Also a decorator: ``@checkpoint`` or ``@checkpoint(keep="matmuls")``. Called with a function alone, a function that
    needs arguments is decorated and one that needs none is called.

    Args:
        fn: any callable: a function, a module, a method.
        keep: what to keep instead of replaying: a ready policy's name (``"nothing"``, ``"everything"``, ``"matmuls"``,
            ``"attention"``), a callable on ``policies.Candidate``, or a list of operators and labels (see ``name``).
        verify: ``"first"`` proves each new program while it is recorded, and again at calls 2, 4, 8, ...; ``"always"``
            at every call; ``"never"`` trusts.

    Raises:
        TypeError: ``fn`` is not callable.
        ChangedTensorError, ReplayError (in backward), ProofError: see ``elbowroom.errors``.
    """
    if torch.compiler.is_compiling():
        return under_compile(fn, args, {k: v for k, v in kwargs.items() if k not in MOOT})
    if fn is None and not args:
        return functools.partial(_decorated, keep=keep, verify=verify)
    if not callable(fn):
        raise TypeError(
            f"checkpoint(fn, *args) needs a callable first, got {type(fn).__name__}. "
            f"Pass the function and its arguments, not its result: checkpoint(fn, x), not checkpoint(fn(x))."
        )
    if not args and not (set(kwargs) - set(MOOT)) and _needs_arguments(fn):
        return _decorated(fn, keep=keep, verify=verify)
    moot = [key for key in MOOT if key in kwargs]
    if moot:
        takes = _keywords_of(fn)
        for key in moot:
            if key not in takes:
                del kwargs[key]
    if isinstance(fn, Module) and wrapped_region(fn) is not None and keep is None:
        return fn(*args, **kwargs)  # wrapped already: it checkpoints itself
    return region_of(fn, keep, verify).run(fn, args, kwargs)


def _decorated(fn: Callable[..., Any], *, keep: Any, verify: str) -> Callable[..., Any]:
    @functools.wraps(fn)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return region_of(fn, keep, verify).run(fn, args, kwargs)

    checkpointed._elbowroom_inner = fn  # type: ignore[attr-defined]
    region_of(fn, keep, verify)  # bad settings are told where they are given
    return checkpointed


def _needs_arguments(fn: Any) -> bool:
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, Module) else fn).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        for p in parameters
    )


def _keywords_of(fn: Any) -> set[str]:
    try:
        return set(inspect.signature(fn.forward if isinstance(fn, Module) else fn).parameters)
    except (TypeError, ValueError):
        return set()


class _Place(NamedTuple):
    """Where the regions of a callable are remembered: with an owner that they must not outlive, and by its code."""

    owner: Any
    part: str | None
    code: Any
    name: str
    module: Module | None


def _place_of(fn: Any) -> _Place:
    """Of a module or a bound method: that object; of a function: its code; of anything else: itself or its type."""
    while isinstance(fn, functools.partial) or hasattr(fn, "_elbowroom_inner"):
        fn = fn.func if isinstance(fn, functools.partial) else fn._elbowroom_inner
    if isinstance(fn, Module):
        code = getattr(type(fn).forward, "__code__", type(fn))
        return _Place(fn, None, code, type(fn).__name__, fn)
    if inspect.ismethod(fn):
        owner = fn.__self__
        code = getattr(fn.__func__, "__code__", type(owner))
        module = owner if isinstance(owner, Module) else None
        place = _Place(owner, fn.__name__, code, f"{type(owner).__name__}.{fn.__name__}", module)
    elif hasattr(fn, "__code__"):
        return _Place(fn.__code__, None, fn.__code__, getattr(fn, "__qualname__", "function"), None)
    else:
        place = _Place(fn, None, type(fn), getattr(fn, "__qualname__", type(fn).__name__), None)
    try:
        weakref.ref(place.owner)
        hash(place.owner)
    except TypeError:  # neither weakly referable nor hashable: its type stands for it
        place = place._replace(owner=type(place.owner))
    return place


def region_of(fn: Any, keep: Any, verify: str) -> Region:
    """The region of a callable under these settings; the same one at every call."""
    place = _place_of(fn)
    by_settings = _regions.setdefault(place.owner, {})
    settings = (place.part, key_of(keep), verify)
    region = by_settings.get(settings)
    if region is None:
        while len(by_settings) >= MAX_SETTINGS:
            del by_settings[next(iter(by_settings))]
        family = family_of(place.code, keep)
        region = by_settings[settings] = Region(place.name, family, keep, verify, place.module)
    return region


def regions_of(fn: Any) -> list[Region]:
    """The regions of a callable under all settings it was called with."""
    place = _place_of(fn)
    return [region for (part, _, _), region in _regions.get(place.owner, {}).items() if part == place.part]


# A module that checkpoints its own forward ---------------------------------------------------------------------------

_REGION = "_elbowroom_region"


class Around(Protocol):
    """What runs around the forward of a whole model (``fit``). Copied and pickled with the module."""

    def run(self, module: Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class _Wrapping:
    """Settings of a wrapped module, in its ``__dict__``: copied and pickled with it, never shared with a copy."""

    def __init__(
        self, keep: Any, verify: str, inner: Any = None, *, is_region: bool = True, around: Around | None = None
    ) -> None:
        self.keep = keep
        self.verify = verify
        self.inner = inner  # a forward that somebody had set on the instance
        self.is_region = is_region
        self.module: weakref.ref[Module] | None = None  # whose we are; a shallow copy shares us until it is seen
        self.around = around
        self.region: Region | None = None

    def __deepcopy__(self, memo: Any) -> _Wrapping:
        inner, around = copy.deepcopy((self.inner, self.around), memo)
        return _Wrapping(self.keep, self.verify, inner, is_region=self.is_region, around=around)

    def __reduce__(self) -> Any:
        return _unpickled, (to_names(self.keep), self.verify, self.inner, self.is_region, self.around)

    def run(self, module: Module, original: Any, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self._of(module)
        fn = own.inner or fn
        if own.is_region:
            inside, region = fn, own.region_for(module, original)

            def fn(*args: Any, **kwargs: Any) -> Any:
                return region.run(inside, args, kwargs)

        if own.around is not None:
            return own.around.run(module, fn, args, kwargs)
        return fn(*args, **kwargs)

    def _of(self, module: Module) -> _Wrapping:
        """Ours, unless ``module`` is a shallow copy, which shares our ``__dict__`` entry: then one of its own."""
        if self.module is None:
            self.module = weakref.ref(module)
        if self.module() is module:
            return self
        own = _Wrapping(self.keep, self.verify, self.inner, is_region=self.is_region, around=copy.copy(self.around))
        own.module = weakref.ref(module)
        module.__dict__[_REGION] = own
        return own

    def region_for(self, module: Module, original: Any) -> Region:
        own = self._of(module)
        if own.region is None:
            code = getattr(original.forward, "__code__", original)
            own.region = Region(original.__name__, family_of(code, own.keep), own.keep, own.verify, module)
        return own.region


_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _unpickled(keep: Any, verify: str, inner: Any, is_region: bool, around: Around | None) -> _Wrapping:
    return _Wrapping(from_names(keep), verify, inner, is_region=is_region, around=around)


def _checkpointing_class(original: Any) -> type:
    """A subclass with the same name whose forward is a region: as torch's parametrize and FSDP2 do it."""
    found = _classes.get(original)
    if found is not None:
        return found

    @functools.wraps(original.forward)
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        fn = functools.partial(original.forward, self)  # looked up now: somebody may have replaced it
        wrapping: _Wrapping | None = self.__dict__.get(_REGION)
        if torch.compiler.is_compiling():
            if wrapping is not None and not wrapping.is_region:
                return fn(*args, **kwargs)
            return under_compile(fn, args, kwargs)
        if wrapping is None:
            return fn(*args, **kwargs)
        return wrapping.run(self, original, fn, args, kwargs)

    def reduce(self: Module, protocol: Any) -> Any:
        return _rebuilt, (original,), self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__

    body = {
        "forward": forward,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_elbowroom_original": original,
    }
    if original.__reduce_ex__ is object.__reduce_ex__ and original.__reduce__ is object.__reduce__:
        body["__reduce_ex__"] = reduce  # our class has no name to be imported by; a class with its own way keeps it
    made = type(original.__name__, (original,), body)
    _classes[original] = made
    return made


def _rebuilt(original: type) -> Any:
    return copyreg.__newobj__(_checkpointing_class(original))  # type: ignore[attr-defined]


def wrap(module: M, *, keep: Any = None, verify: str = "first") -> M:
    """The same module object, checkpointing its own forward from now on.

    Names, ``state_dict``, hooks, attributes, ``isinstance``, ``len``, ``deepcopy`` and pickle are as before; hooks run
    outside the region. Wrapping again replaces the settings. ``unwrap`` undoes it.

    Raises TypeError if ``module`` is not an ``nn.Module``, UsageError for bad settings.
    """
    if not isinstance(module, Module):
        raise TypeError(
            f"wrap(module) needs an nn.Module, got {type(module).__name__}; for a function use checkpoint(fn, ...)"
        )
    Region(type(module).__name__, family_of(type(module), keep), keep, verify, module)  # bad settings are told here
    around = around_of(module)
    unwrap(module)
    _put_on(module, _Wrapping(keep, verify, around=around))
    return module


def unwrap(module: M) -> M:
    """The same module object as it was before ``wrap``; a module that is not wrapped stays as it is."""
    wrapping: _Wrapping | None = module.__dict__.pop(_REGION, None)
    if wrapping is not None:
        if wrapping.inner is not None:
            module.__dict__["forward"] = wrapping.inner
        if "_elbowroom_original" in type(module).__dict__:  # else another engine put its own class on top
            module.__class__ = type(module)._elbowroom_original  # type: ignore[attr-defined]
    return module


def surround(module: Module, around: Around) -> None:
    """Have ``around`` run around the forward of ``module`` (and around its region, if it is one) from now on."""
    wrapping: _Wrapping | None = module.__dict__.get(_REGION)
    if wrapping is None:
        _put_on(module, _Wrapping(None, "first", is_region=False, around=around))
    else:
        wrapping._of(module).around = around


def bare(module: Module) -> None:
    """Undo ``surround``; a region that the module is stays."""
    wrapping: _Wrapping | None = module.__dict__.get(_REGION)
    if wrapping is not None:
        wrapping = wrapping._of(module)
        wrapping.around = None
        if not wrapping.is_region:
            unwrap(module)


def around_of(module: Module) -> Around | None:
    """What runs around the forward of ``module``, if anything does."""
    wrapping: _Wrapping | None = module.__dict__.get(_REGION)
    return None if wrapping is None else wrapping._of(module).around


def _put_on(module: Module, wrapping: _Wrapping) -> None:
    wrapping.inner = module.__dict__.pop("forward", None)
    if getattr(type(module), "_elbowroom_original", None) is None:
        module.__class__ = _checkpointing_class(type(module))
    wrapping.module = weakref.ref(module)
    module.__dict__[_REGION] = wrapping


def name(tensor: Tensor, label: str) -> Tensor:
    """Label a value, so that ``keep=[label]`` can name it. Returns the tensor; outside a region it does no more."""
    if not isinstance(label, str):
        raise UsageError(f"name(tensor, label): the label is a string, got {type(label).__name__}")
    with torch._C.DisableTorchFunction():
        for recorder in reversed(recorders()):
            if drafting.label(recorder, tensor, label):
                break
    return tensor


def wrapped_region(module: Module) -> Region | None:
    """The region of a wrapped module, if it is one."""
    wrapping: _Wrapping | None = module.__dict__.get(_REGION)
    if wrapping is None or not wrapping.is_region:
        return None
    return wrapping.region_for(module, getattr(type(module), "_elbowroom_original", type(module)))
