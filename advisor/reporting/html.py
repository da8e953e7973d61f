"""The report as one self-contained HTML file: no network, no server, the same bytes for the same run."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup, escape

from advisor.analysis.convolutions import products
from advisor.core import units
from advisor.core.findings import Findings, Outcome
from advisor.core.held import MemoryLook
from advisor.core.metrics import BY_NAME
from advisor.core.profile import KernelRow, StepProfile
from advisor.core.provenance import Provenance
from advisor.core.timeline import Timeline
from advisor.core.verdict import Status, TrialLog, Verdict
from advisor.reporting import breakdown, charts, convolutions, course, layertable, machine, numbers, places, wording
from advisor.reporting import timeline as timeline_data
from advisor.reporting.facts import facts

# With these the file stays near 1 MB for any run; what is left out is in profile.json and trials.json.
MAX_KERNELS = 500
MAX_MODULES = 400
MAX_PRODUCTS = 400
MAX_PLACES = 1000  # of which the same is said
MAX_SITES = 30  # of a finding
FIRST_CARDS = 3  # that are open as the page opens
MAX_NAME = 400  # of a kernel's full name, which can be ten thousand characters of template arguments
PROVENANCE_MARKS = {Provenance.MEASURED: "●", Provenance.MODELLED: "◐", Provenance.UNAVAILABLE: "○"}


def report_html(
    profile: StepProfile,
    findings: Findings | None,
    trials: TrialLog | None,
    timeline: Timeline | None = None,
    look: MemoryLook | None = None,
) -> str:
    """The whole run as an HTML document that opens from `file://`. Everything taken from the run is escaped."""
    context = _context(profile, findings, trials, timeline_data.drawn(timeline)) | _layers(profile, look)
    return _environment().get_template("report.html.jinja").render(context) + "\n"


def json_script(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in, whatever the names in it."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def code_spans(text: str) -> Markup:
    """Text with what stands between two backticks as code, everything escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts))


def web_address(text: str) -> bool:
    """True for addresses that may become links; rules are data from anywhere, and `javascript:` is an address too."""
    return re.match(r"https?://[^\s]+$", text) is not None


@functools.cache
def _environment() -> jinja2.Environment:
    folder = files("advisor.reporting").joinpath("templates")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": units.bytes_text,
        "time": units.time_text,
        "percent": units.percent_text,
        "count": lambda value: f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.3g}",
        "flops": units.flops_text,
        "rate": units.rate_text,
        "duration": numbers.duration,
        "gain": numbers.gain,
        "saves": numbers.saves,
        "factor": numbers.factor,
        "value": numbers.value,
        "unit": numbers.unit,
        "counted": units.counted,
        "tracing": wording.tracing,
        "sentence": wording.sentence,
        "grouped": places.grouped,
        "px2": lambda value: f"{value:.2f}",
        "meaning": _meaning,
        "numbers": lambda evidence: [e for e in evidence if e.value is not None and not isinstance(e.value, bool)],
        "px": lambda value: f"{value:.1f}",
        "name": numbers.kernel_name,
        "ticks": code_spans,
        "cut": lambda text: text if len(text) <= MAX_NAME else text[:MAX_NAME] + "…",
    }
    environment.tests["web_address"] = web_address
    environment.globals |= {
        "semantics": wording.SEMANTICS,
        "mark": PROVENANCE_MARKS,
        "kinds": breakdown.KIND_LABELS,
        "max_places": MAX_PLACES,
        "max_sites": MAX_SITES,
        "first_cards": FIRST_CARDS,
    }
    return environment


def _context(
    profile: StepProfile,
    findings: Findings | None,
    trials: TrialLog | None,
    timeline: timeline_data.Drawn | None,
) -> dict[str, Any]:
    causes, division = breakdown.causes(profile), breakdown.division(profile)
    rows = sorted(profile.kernels, key=lambda r: (-r.time_us, r.name, r.module, r.phase, r.source))
    known = profile.step_us is None or breakdown.limit_frac(profile) is not None
    return {
        "profile": profile,
        "env": profile.environment,
        "on_gpu": profile.environment.device == "cuda",
        "script": wording.script(profile),
        "machine": wording.machine(profile),
        "headline": wording.headline(profile, findings, trials),
        "no_limit": "" if trials or not findings or known else wording.sentence(wording.limit_sentence(profile)),
        "tiles": _tiles(profile, trials),
        "kept_line": _kept_line(trials) if trials else "",
        "timeline": timeline,
        "step_plot": charts.step_plot(profile),
        "next": _next(profile, findings, trials),
        "division": division,
        "causes": causes,
        "cause_bar": charts.stacked([(c.key, c.label, c.time_us, c.idle) for c in causes]),
        "phase_bar": charts.stacked(
            [(name, name, time, False) for name, time in sorted(profile.phase_us.items(), key=_phase_order)]
        ),
        "sites": [(c, site) for c in causes for site in c.sites],
        "gaps": breakdown.gaps(profile, 12),
        "roofline": charts.roofline(profile),
        "convolutions": [(p, convolutions.about(p)) for p in products(profile)[:MAX_PRODUCTS]],
        "kernels": [_kernel(r, division) for r in rows[:MAX_KERNELS]],
        "kernels_left": len(rows) - len(rows[:MAX_KERNELS]),
        "utilization": [
            (name, BY_NAME[name].doc if name in BY_NAME else "", quantity)
            for name, quantity in sorted(profile.utilization.items())
            if quantity.value is not None
        ],
        "unavailable": _unavailable(profile),
        "metric_docs": {name: spec.doc for name, spec in BY_NAME.items()},
        **_of_findings(profile, findings),
        **_of_trials(trials),
        "facts": facts(profile),
        "data": json_script(machine.report_json(profile, findings, trials)["summary"]),
        "css": Markup(_asset("report.css")),
        "js": Markup(_asset("report.js") + (_asset("timeline.js") if timeline else "")),
    }


def _of_findings(profile: StepProfile, findings: Findings | None) -> dict[str, Any]:
    """The sections on what the rules said."""
    return {
        "findings": findings,
        "cards": wording.cards(findings),
        "tries": functools.partial(wording.next_apply, profile, "advisor"),
        "quiet": [f for f in findings.findings if f.outcome is Outcome.QUIET] if findings else [],
        "unevaluated": wording.unevaluated(findings) if findings else [],
        "unknown": [f for f in findings.findings if f.outcome is Outcome.UNKNOWN] if findings else [],
        "counts": wording.counts(findings) if findings else "",
    }


def _of_trials(trials: TrialLog | None) -> dict[str, Any]:
    """The sections on what was tried."""
    return {
        "trials": trials,
        "axis": charts.gain_axis(trials) if trials else None,
        "attempts": _attempts(trials) if trials else [],
        "left_out": any(v.left_out_gain is not None for v in trials.verdicts) if trials else False,
        "rounds": _rounds(trials) if trials else [],
        "spent": wording.spent(trials) if trials else "",
        "confidence": wording.confidence(trials) if trials else "",
        "losses": charts.loss_plot(trials.stack.losses_plain, trials.stack.losses_stack)
        if trials and trials.stack
        else None,
    }


def _layers(profile: StepProfile, look: MemoryLook | None) -> dict[str, Any]:
    """The sections on modules: the table of layers, and the memory over a step."""
    modules = breakdown.modules(profile)
    known, kept = layertable.layer_table(profile), layertable.kept_below(look)
    return {
        "modules": [(m, known.get(m.path, layertable.Layer()), kept.get(m.path, 0)) for m in _longest(modules)],
        "modules_left": max(0, len(modules) - MAX_MODULES),
        "kept_known": bool(kept),
        "limit_known": any(m.limit_us > 0 for m in modules),
        "memory": course.course_plot(look),
    }


def _unavailable(profile: StepProfile) -> list[tuple[str, list[str]]]:
    """What could not be measured of the machine, by its reason."""
    names: dict[str, list[str]] = {}
    for name, quantity in sorted(profile.utilization.items()):
        if quantity.value is None:
            names.setdefault(quantity.reason or "no reason was recorded", []).append(name)
    return sorted(names.items())


def _longest(modules: tuple[breakdown.ModuleTime, ...]) -> list[breakdown.ModuleTime]:
    """The longest modules in tree order. A parent is never shorter than its child, so no row loses its parent."""
    longest = sorted(range(len(modules)), key=lambda i: (-modules[i].time_us, i))[:MAX_MODULES]
    return [modules[i] for i in sorted(longest)]


def _asset(name: str) -> str:
    return files("advisor.reporting").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


def _phase_order(item: tuple[str, float]) -> tuple[int, str]:
    order = {"forward": 0, "backward": 1, "optimizer": 2, "average": 3}
    return order.get(item[0], 4), item[0]


def _tiles(profile: StepProfile, trials: TrialLog | None) -> list[tuple[str, str, str]]:
    """The numbers at the head: (label, value, note)."""
    tiles = []
    stack = trials.stack if trials is not None else None
    # What is not proved is never the largest number on the page: it stands among the trials.
    if stack is not None and stack.speedup is not None and stack.passed:
        label, speedup, low, high = "Speed-up", stack.speedup, stack.speedup_low, stack.speedup_high
        if stack.by_device and stack.device_speedup is not None:
            label, speedup = "Device time shorter", stack.device_speedup
            low, high = stack.device_speedup_low, stack.device_speedup_high
        note = units.bounds_text(low, high) if low is not None and high is not None else ""
        tiles.append((label, numbers.factor(speedup), note))
    if stack is not None and stack.passed and stack.samples_per_s_plain and stack.samples_per_s_stack:
        note = f"samples/s, {units.samples_text(stack.samples_per_s_plain)} plain"
        tiles.append(("Rate with the plan", units.samples_text(stack.samples_per_s_stack), note))
    plain = " as written" if trials is not None else ""
    if profile.step_us is not None:
        tiles.append(
            (f"Step{plain}", numbers.duration(profile.step_us.median), units.unbroken(wording.step_spread(profile)))
        )
    frac = breakdown.limit_frac(profile)
    if frac is not None:
        tiles.append(
            (
                f"Of the limit{plain}",
                units.percent_text(frac),
                f"limit {numbers.duration(profile.limit_us, profile.typical_us)}",
            )
        )
    if (rate := breakdown.samples_per_s(profile)) is not None and stack is None:
        tiles.append(("Rate", units.samples_text(rate), wording.rate_unit(profile)))
    nbytes, provenance = breakdown.dram_bytes(profile)
    if nbytes:
        tiles.append(("Memory traffic", units.bytes_text(nbytes), f"a step, {provenance.value}"))
    if profile.memory.peak_allocated_bytes:
        total = profile.memory.total_bytes
        note = f"of {units.bytes_text(total)}" if total else "allocated"
        tiles.append(("Peak memory", units.bytes_text(profile.memory.peak_allocated_bytes), note))
    return tiles[:6]


def _meaning(metric: str) -> str:
    """What a metric is, in words."""
    return BY_NAME[metric].doc if metric in BY_NAME else metric


def _kept_line(trials: TrialLog) -> str:
    """The kept changes in a line, and how many of the others came to what."""
    kept = [v.title or v.transform for v in wording.kept(trials)]
    others = Counter(v.status for v in trials.verdicts if v.status != Status.KEPT)
    told = [f"Kept: {', '.join(kept)}."] if kept else []
    told += [f"Not kept: {', '.join(f'{n} {status}' for status, n in others.items())}."] if others else []
    return " ".join(told)


def _next(profile: StepProfile, findings: Findings | None, trials: TrialLog | None) -> tuple[str, str] | None:
    """What to do now, and the command for it."""
    if trials is not None:
        command = wording.next_of_trials(trials, "advisor")
        label = "Train with the plan:" if wording.usable(trials) else "Settle the unconfirmed changes:"
        return (label, command) if command else None
    if findings is not None and findings.recommendations and (command := wording.next_apply(profile, "advisor")):
        return "Try the findings:", command
    return None


def _kernel(row: KernelRow, step: breakdown.Division) -> dict[str, Any]:
    nbytes, provenance = breakdown.row_bytes(row)
    time = step.stretch * row.time_us
    return {
        "row": row,
        "kind": breakdown.KIND_LABELS.get(row.kind, row.kind),
        "time_us": time,
        "frac": time / step.total_us if step.total_us else 0.0,
        "efficiency": min(1.0, row.limit_us / time) if row.limit_us > 0 and time > 0 else None,
        "bytes": nbytes,
        "provenance": provenance,
    }


def _rounds(trials: TrialLog) -> list[str]:
    """A line for each round, where there was more than one."""
    numbers = sorted({v.round for v in trials.verdicts})
    return [wording.round_headline(trials, number) for number in numbers] if len(numbers) > 1 else []


def _attempts(trials: TrialLog) -> list[tuple[Verdict, charts.BlockPlot | None, list[tuple[str, Any]]]]:
    return [
        (v, charts.block_plot(v.blocks), [("Effect", v.effect), ("Numerics", v.numerics), ("Timing", v.timing)])
        for v in trials.verdicts
    ]
