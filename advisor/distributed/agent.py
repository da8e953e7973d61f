"""torchrun's agent for the ranks of `--gpus N`: `python -m advisor.distributed.agent --standalone --nproc-per-node N train.py …`.

torchrun says how ranks ended in forty lines, each failure behind the next. Here the supervisor is told each rank's exit code, and names
the one that began it (fallen.py).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from advisor.distributed import place
from advisor.loop.session import from_environment, tell


def main(words: Sequence[str]) -> int:
    """The exit code of the rank that ended first, 128 and its number for a signal; 0 where all ended well."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # of what is told here
    try:
        run.main(list(words))
    except ChildFailedError as error:
        codes = {failure.local_rank: failure.exitcode for failure in error.failures.values()}
        if (session := from_environment()) is not None:
            tell(session, place.ENDED, codes=codes)
        first = error.get_first_failure()[1].exitcode
        return first if first > 0 else 128 - first
    except SignalException as asked:
        return 128 + int(asked.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
