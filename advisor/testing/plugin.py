"""The pytest plugin: fixtures `perf`, `perf_gpu`, `perf_baseline`, `perf_env`, the marker `perf` and the `--perf-…` flags.

Loading it imports neither torch nor anything that needs it, and no more of advisor than a test run without performance
tests can afford. It does nothing unless a test uses a fixture or the marker.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from advisor.core.environment import Environment
    from advisor.testing.baselines import Stored
    from advisor.testing.marker import Marked
    from advisor.testing.options import Options
    from advisor.testing.perf import Perf
    from advisor.testing.records import Tested

FIXTURES = frozenset({"perf", "perf_gpu", "perf_baseline", "perf_env"})
MARKER = "perf"
REPORTED = "advisor_perf"  # attribute of a test report: its records as plain data, which xdist passes on

_options: pytest.StashKey[Options] = pytest.StashKey()
_tested: pytest.StashKey[dict[str, Tested]] = pytest.StashKey()
_files: pytest.StashKey[dict[str, str]] = pytest.StashKey()
_unwritten: pytest.StashKey[list[str]] = pytest.StashKey()
_marked: pytest.StashKey[Marked] = pytest.StashKey()
_perf: pytest.StashKey[Perf] = pytest.StashKey()
_problem: pytest.StashKey[str] = pytest.StashKey()  # with the test's marker


# -- configuration ----------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    from advisor.testing import options

    options.add(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "perf(max_step_ms, max_memory, max_kernels, no_sync, baseline, tolerance, min_arch, gpus): budgets for what the "
        "test measures with the `perf` fixture, and the GPU it needs (advisor)",
    )
    config.stash[_tested] = {}
    config.stash[_files] = {}
    config.stash[_unwritten] = []
    if any(
        config.getoption(name) for name in ("perf_only", "perf_skip", "perf_compare_fail", "perf_update", "perf_save")
    ):
        options_of(config)  # what contradicts itself is told before anything runs


def options_of(config: pytest.Config) -> Options:
    """The run's flags, read once.

    Raises:
        pytest.UsageError: for flags that contradict each other or cannot be read.
    """
    if _options not in config.stash:
        from advisor.core.errors import AdvisorError
        from advisor.testing import options

        try:
            config.stash[_options] = options.read(config)
        except AdvisorError as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[_options]


# -- collection -------------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Read every marker: one that says nothing that advisor understands is an error, never silently without effect."""
    problems = []
    for item in items:
        if problem := _read_marker(item):
            item.stash[_problem] = problem
            problems.append(f"{item.nodeid}: {problem}")
    # A worker of xdist cannot say so: there the tests themselves are errors.
    if problems and not hasattr(config, "workerinput"):
        raise pytest.UsageError(*problems)
    only, skip = config.getoption("perf_only"), config.getoption("perf_skip")
    if only:
        rest = [item for item in items if not _measures(item)]
        if rest:
            config.hook.pytest_deselected(items=rest)
            items[:] = [item for item in items if _measures(item)]
    elif skip:
        for item in items:
            if _measures(item):
                item.add_marker(pytest.mark.skip(reason="--perf-skip"))


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def _measures(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARKER) is not None or not FIXTURES.isdisjoint(_fixtures(item))


def _read_marker(item: pytest.Item) -> str:
    """What is wrong with the item's markers; "" when nothing is. A closer marker's keywords go before a farther one's."""
    markers = list(item.iter_markers(MARKER))
    if not markers:
        return ""
    from advisor.core.errors import AdvisorError
    from advisor.testing import marker

    keywords: dict[str, Any] = {}
    for found in reversed(markers):
        keywords.update(found.kwargs)
    try:
        args = next((found.args for found in markers if found.args), ())
        marked = item.stash[_marked] = marker.parse(args, keywords)
    except AdvisorError as error:
        return str(error)
    if marked.judges and "perf" not in _fixtures(item):
        return "the perf marker sets budgets, but the test does not use the fixture `perf`"
    return ""


# -- running ----------------------------------------------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`gpus` and `min_arch` are needs: a test without them is skipped, or fails under --perf-require-gpu."""
    if _problem in item.stash:
        pytest.fail(item.stash[_problem], pytrace=False)
    marked = item.stash.get(_marked, None)
    if marked is None or not marked.needs_gpu:
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = max(1, marked.gpus)
    if count < wanted:
        _without_gpu(item.config, f"needs {wanted} CUDA GPU{'s' if wanted > 1 else ''}, {count or 'none'} found")
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < marked.min_arch:
        _without_gpu(item.config, f"needs sm_{marked.min_arch}, this GPU is sm_{10 * major + minor}")


def _without_gpu(config: pytest.Config, reason: str) -> None:
    __tracebackhide__ = True
    if options_of(config).require_gpu:
        pytest.fail(f"{reason} (--perf-require-gpu)", pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """After the test's own body: the marker's budgets and the run's baseline. Their failure is the test's."""
    result = yield
    if _perf in item.stash:
        from advisor.core.errors import AdvisorError

        problem = ""
        try:
            item.stash[_perf].check()
        except (AssertionError, AdvisorError) as error:
            problem = str(error)
        if problem:
            pytest.fail(problem, pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test's records go with its report: of its call, or of the setup that has kept it from one."""
    report = yield
    if _perf not in item.stash or call.when == "teardown" or (call.when == "setup" and report.passed):
        return report
    from dataclasses import replace

    from advisor.core.storage import to_plain
    from advisor.testing.records import XFAILED, Tested

    perf = item.stash[_perf]
    records = perf.records()
    folder = options_of(item.config).report_dir
    if report.failed and folder is not None:
        paths, problem = perf.write_reports(folder)
        records = [replace(r, report=path) for r, path in zip(records, paths, strict=False)] + records[len(paths) :]
        report.sections.append(("advisor report", "\n".join([*paths, *filter(None, [problem])])))
    if records:
        outcome = XFAILED if report.skipped and hasattr(report, "wasxfail") else report.outcome
        setattr(report, REPORTED, to_plain(Tested(test=item.nodeid, outcome=outcome, records=tuple(records))))
    del item.stash[_perf]  # results hold the step's modules
    return report


class _Collector:
    """Gathers what reports carry. Registered on the controller alone, which is also where files are written."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        plain = getattr(report, REPORTED, None)
        if plain is not None:
            from advisor.core.storage import from_plain
            from advisor.testing.records import Tested

            self._config.stash[_tested][report.nodeid] = from_plain(Tested, plain)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Files come last: one that cannot be written is told below what the tests have said, and no run with it is good."""
        tested = list(self._config.stash[_tested].values())
        if tested:
            from advisor.testing import storing

            files, problems = storing.write(options_of(self._config), tested)
            self._config.stash[_files], self._config.stash[_unwritten] = files, problems
            if problems and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        tested = self._config.stash[_tested]
        if not tested:
            return
        from advisor.testing import section

        terminalreporter.section(section.TITLE)
        for text, failed in section.lines(tested.values(), self._config.stash[_files]):
            terminalreporter.write_line(text, red=failed)
        for problem in self._config.stash[_unwritten]:
            terminalreporter.write_line(problem, red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Collector(session.config), "advisor-collector")


# -- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def perf(request: pytest.FixtureRequest) -> Perf:
    """Measures and compares training steps, on a CPU or a GPU: `perf.measure(step)`, `perf.compare(old, new)`."""
    from advisor.testing.marker import Marked
    from advisor.testing.perf import Perf

    item = request.node
    marked = item.stash.get(_marked, None) or Marked(maxima={})
    item.stash[_perf] = found = Perf(item.nodeid, options_of(request.config), marked, pytest.skip)
    return found


@pytest.fixture
def perf_gpu(perf: Perf, request: pytest.FixtureRequest) -> Perf:
    """`perf` where there is a CUDA GPU; elsewhere the test is skipped, with the reason."""
    import torch

    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        _without_gpu(request.config, f"needs a CUDA GPU: torch {torch.__version__} ({build}) sees none")
    return perf


@pytest.fixture
def perf_baseline(perf: Perf) -> Callable[..., Stored]:
    """`perf_baseline("main")`: what a stored baseline holds of this test, for the `baseline=` of an assertion."""
    return perf.baseline


@pytest.fixture(scope="session")
def perf_env() -> Environment:
    """The machine's fingerprint: GPU, libraries, measured rates. Measured once a machine, in a few seconds."""
    from advisor.profiling.machine import environment

    return environment.probe()
