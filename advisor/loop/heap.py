"""Objects of a class that live in this process, whoever holds them.

Not by `gc.get_objects`: its list holds every tuple in the process, also those that another thread is still building, and
`tuple(generator)` fails when it finds its tuple in other hands. A DataLoader's pinning thread builds one for each batch that is a
tuple, and spends most of its time in it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any


def classes(base: type = object) -> Iterator[type]:
    """`base` and all classes made from it, each once."""
    found = {id(base)}  # identities: a metaclass's own hash is code of the user's, as is an object's own __class__
    waiting = [base]
    while waiting:
        one = waiting.pop()
        yield one
        # Not one.__subclasses__(): of a metaclass that is the method itself, and a class may have one of its own.
        made: list[type] = type.__subclasses__(one)
        waiting += [cls for cls in made if id(cls) not in found]
        found.update(map(id, made))


def living(kinds: Iterable[type]) -> list[Any]:
    """All objects whose class is one of `kinds`; tens of milliseconds, so not in a timed step.

    `kinds` are classes written in Python: their objects refer to their class, and so can be asked for by it.
    """
    wanted = {id(kind): kind for kind in kinds}
    return [found for found in gc.get_referrers(*wanted.values()) if id(type(found)) in wanted] if wanted else []
