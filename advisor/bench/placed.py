"""The bundled operations as a captured graph calls them, through sites: for the host's times of a case outside of any graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from advisor.ops import catalog
from advisor.ops.family import Case
from advisor.ops.sites import install, native

Function = Callable[..., Any]


@contextmanager
def placed(function: Function) -> Iterator[Function]:
    """Inside, every family's functions are sites where they are looked up in its api; what is given is `function` so.

    Without a C++ compiler it is the function itself, which is what a graph calls then.
    """
    if native.module() is None:
        yield function
        return
    with ExitStack() as stack:
        sites: dict[Function, Function] = {}
        for family in catalog.FAMILIES:
            api = family.module("api")
            for own in list(vars(api).values()):
                if inspect.isfunction(own) and own.__module__ == api.__name__ and _is_operation(own):
                    sites[own] = _by_any_call(own)
                    stack.enter_context(mock.patch.object(api, own.__name__, sites[own]))
        yield _placed(function, sites)


def _placed(value: Any, sites: Mapping[Function, Function]) -> Any:
    if isinstance(value, partial):
        keywords = {name: _placed(one, sites) for name, one in value.keywords.items()}
        return partial(_placed(value.func, sites), *value.args, **keywords)
    if isinstance(value, Case):
        return replace(value, ours=_placed(value.ours, sites))
    return sites.get(value, value) if inspect.isfunction(value) else value


def _is_operation(function: Any) -> bool:
    return not function.__name__.startswith("_") and function.__annotations__.get("return") not in (
        "str",
        "torch.dtype",
    )


def _by_any_call(function: Function) -> Function:
    """A site takes positional arguments alone, and in a graph it is one call's: here one for each set of names and first argument's shape."""
    found: dict[tuple[Any, ...], Function] = {}

    def call(*arguments: Any, **keywords: Any) -> Any:
        key = getattr(arguments[0], "shape", None), *keywords
        if key not in found:
            found[key] = install.site(function, tuple(keywords))
        return found[key](*arguments, *keywords.values())

    return call
