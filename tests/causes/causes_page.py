"""Which card the planted cause of each small training is: docs/causes/<machine>.json, and docs/causes.md made from it.

python tests/causes/causes_page.py --run gpu              profile every training of the catalogue here, then write the page
python tests/causes/causes_page.py --run cpu --only fp64  only those with this in their names; what else is on record stays
python tests/causes/causes_page.py --run gpu --cases DIR  trainings from a folder as well, by their lines `# EXPECT: rule|rule` (and `# ON: gpu`)
python tests/causes/causes_page.py --read gpu --runs DIR  put on record what lies in run folders that --run has kept
python tests/causes/causes_page.py --join gpu FILE        put on record what another machine of that kind has recorded in FILE
python tests/causes/causes_page.py                        write the page from what is recorded

On several GPUs one training runs on each, with its share of the cores; --lanes N does so on a CPU's cores. A cause is found where one of its rules is among those
of the first or the second card. Where only the user can make the cure, a training that has its fault by turns says what it costs
of the step, which is held against the card's interval; the training without it must no more be told of the fault.

Trainings of varied/ have causes of the same kinds in other loops, with other models and names.

Sound trainings are those of sound/: nothing is planted, and they are tuned as a careful practitioner would. Where the first card of
one promises a gain by a change of advisor's, `advisor try` switches that by turns in one process, and what it gains is held against
the interval. A promise without a change, or whose gain nobody could measure, is false.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import causes_catalogue

from advisor.trials.statistics import gain_interval

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "docs" / "causes"
PAGE = ROOT / "docs" / "causes.md"
TIMEOUT_S = 600
CURED = "-cured"
SOUND, VARIED = Path(__file__).with_name("sound"), Path(__file__).with_name("varied")
OF_THE_MACHINE = ("cores-taken-by-others", "gpu-shared")
WORTH_FRAC = 0.01  # apply's --min-gain
CONFIDENCE = 0.95
UNSURE_FRAC, UNSURE_COST = 0.02, 0.25  # half an interval of a cost: of the step, or of itself
TRIAL_S = 90
POLL_S, STOP_S = 0.5, 30.0
TRUE, FALSE, NO_PROMISE, NOT_JUDGED = "true", "false", "no promise", "not judged"
SHOWN = 3  # cards of a report that are put on record


@dataclass(frozen=True, slots=True)
class Training:
    """A script, the rules that are wanted of its first two cards (none: a sound one), and the script that has the fault by turns."""

    name: str
    text: str
    expect: tuple[str, ...]
    by_turns: str = ""
    one_core: bool = False
    sound: bool = False  # nothing is planted: what its first card promises is measured


def trainings(machine: str, folders: Sequence[Path] = ()) -> list[Training]:
    """Those of the catalogue, each followed by the one without its fault where there is one; then those of the folders."""
    found = []
    for name, fault, text in causes_catalogue.scripts(machine):
        if not fault.needs():
            continue
        # A cost in the process's own time is that of one thread, and so is what a profile on one core foretells.
        by_wall = "epoch" in fault.by_turns or any("by_wall" in slot for slot in fault.by_turns.values())
        one_core = machine == "cpu" and fault.cured is not None and not by_wall
        if name.endswith(CURED):
            found.append(Training(name, text, (), one_core=one_core))
            continue
        if not fault.expect:
            found.append(Training(name, text, (), sound=True))
            continue
        style = name.removeprefix(fault.id + "-")
        by_turns = causes_catalogue.alternating(fault, style) if fault.cured is not None else ""
        found.append(Training(name, text, fault.expect, by_turns, one_core))
    for path in sorted(SOUND.glob("*.py")):
        found.append(Training(f"sound-{path.stem}", path.read_text(encoding="utf-8"), (), sound=True))
    for folder in (VARIED, *folders):
        for path in sorted(folder.glob("*.py")):
            text = path.read_text(encoding="utf-8")
            wanted = re.search(r"^# EXPECT: ([\w|-]+)", text, re.MULTILINE)
            only_on = re.search(r"^# ON: (\w+)", text, re.MULTILINE)
            if wanted and (only_on is None or only_on[1] == machine):
                name = f"varied-{path.stem}" if folder == VARIED else path.stem
                found.append(Training(name, text, tuple(wanted[1].split("|"))))
    return found


def rank(expect: Sequence[str], cards: Sequence[dict[str, Any]]) -> int:
    """Which card, from 1, has one of these rules; 0 where none has."""
    places = (place for place, card in enumerate(cards, 1) if set(card["rules"]) & set(expect))
    return next(places, 0)


def measured(training: Training, folder: Path, environment: dict[str, str], prefix: Sequence[str]) -> dict[str, Any]:
    """Profile one training and say what its report's first cards are, and what its fault costs where that can be measured."""
    script = folder / f"{training.name}.py"
    script.write_text(training.text, encoding="utf-8")
    if training.one_core and shutil.which("taskset"):
        last = prefix[-1].split(",")[-1] if prefix else str(max(os.sched_getaffinity(0)))
        prefix = ["taskset", "-c", last]
    found = profiled(training, script, environment, prefix)
    if training.by_turns and "error" not in found:
        script = folder / f"{training.name}-by-turns.py"
        script.write_text(training.by_turns, encoding="utf-8")
        found["cost"] = cost(script, environment, prefix)
    first = (found.get("cards") or [None])[0]
    if training.sound and first and first["transform"] and _promises(first):
        found["gained"] = gained(first["transform"], folder / f"{training.name}.py", environment, prefix)
    return found


def cost(script: Path, environment: dict[str, str], prefix: Sequence[str]) -> list[float] | None:
    """Low, middle and high end of the share of a step that the fault takes, as the script says; None where it does not."""
    environment = {**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    command = [*prefix, sys.executable, str(script)]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    told = re.findall(r'^\{"cost": (.+)\}$', ended.stdout, re.MULTILINE)
    found: list[float] | None = json.loads(told[-1]) if told else None
    return found


def gained(change: str, script: Path, environment: dict[str, str], prefix: Sequence[str]) -> dict[str, Any]:
    """What the change gains when it is switched by turns: "share" (low, middle, high; None: not measured) and the trial's own word.

    The blocks say it: fresh runs that would come after them are not waited for.
    """
    run = script.parent / f"{script.stem}-tried"
    command = [*prefix, sys.executable, "-m", "advisor", "try", "-q", "--change", change]
    command += ["--max-time", f"{TRIAL_S}s", "-o", str(run), str(script)]
    trial = subprocess.Popen(
        command, cwd=script.parent, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for _ in range(round(TIMEOUT_S / POLL_S)):
        if tried(change, run)["share"] is not None or trial.poll() is not None:
            break
        time.sleep(POLL_S)
    if trial.poll() is None:
        trial.send_signal(signal.SIGINT)
        try:
            trial.wait(STOP_S)
        except subprocess.TimeoutExpired:
            trial.kill()
            trial.wait()
    return tried(change, run)


def tried(change: str, run: Path) -> dict[str, Any]:
    """What the trial of this change that lies in the run folder has measured, and how it ended."""
    for path in sorted(run.glob("trials/*.json")):
        verdict = json.loads(path.read_text(encoding="utf-8"))  # written as a whole
        if verdict.get("transform") != change or "status" not in verdict:  # without one: the trial goes on
            continue
        blocks = verdict.get("blocks") or {}
        pairs = list(zip(blocks.get("off_us", ()), blocks.get("on_us", ()), strict=False))
        told = gain_interval(pairs, CONFIDENCE)
        share = [round(value, 4) for value in (told[0].low, told[1], told[0].high)] if told else None
        return {"change": change, "share": share, "verdict": f"{verdict['status']}: {verdict['reason']}"}
    return {"change": change, "share": None, "verdict": "no trial"}


def _promises(card: dict[str, Any]) -> bool:
    """Whether what the card says may be gained is worth a change."""
    return card["predicted"] is None or card["predicted"][1] >= WORTH_FRAC


def profiled(training: Training, script: Path, environment: dict[str, str], prefix: Sequence[str]) -> dict[str, Any]:
    """The first cards of the training's report."""
    folder = script.parent
    run = folder / training.name
    command = [*prefix, sys.executable, "-m", "advisor", "profile", "-q", "-o", str(run), str(script)]
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        return read(training, run)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {TIMEOUT_S} s"}
    except (OSError, ValueError) as error:
        return {"error": f"exit code {ended.returncode}: {ended.stderr.strip()[-300:] or error}"}


def read(training: Training, run: Path) -> dict[str, Any]:
    """The first cards of the report that lies in this run folder.

    Raises:
        OSError, ValueError: when there is none.
    """
    findings = json.loads((run / "findings.json").read_text(encoding="utf-8"))
    profile = json.loads((run / "profile.json").read_text(encoding="utf-8"))
    cards = [shown(card) for card in findings["cards"]]
    step = profile.get("step_us") or profile.get("wall_us")
    return {
        "rank": rank(training.expect, cards),
        "cards": cards[:SHOWN],
        "disturbed": any(set(card["rules"]) & set(OF_THE_MACHINE) for card in cards),
        "step_us": round(step["median"], 1) if step else None,
        "expected": next((card for card in cards if set(card["rules"]) & set(training.expect)), None),
    }


def shown(card: dict[str, Any]) -> dict[str, Any]:
    """What the record holds of a card: its rules, the leading one first, and the share of the step it is predicted to save."""
    gain = card.get("predicted")
    rules = [card["rule"], *card.get("reasons", ())]
    return {
        "rules": rules,
        "transform": card.get("transform", ""),
        "predicted": [round(gain["low"], 4), round(gain["high"], 4)] if gain else None,
    }


def run(
    machine: str,
    chosen: Sequence[Training],
    runs: Path | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda results: None,
    lanes_on_cpu: int = 1,
) -> dict[str, Any]:
    """Profile these, as many at once as there are GPUs, or lanes asked for on a CPU.

    `runs`: where their run folders stay, None for nowhere. `keep` is handed each result as it comes: the next may never end.
    """
    keeping = threading.Lock()
    waiting: SimpleQueue[Training] = SimpleQueue()
    for training in chosen:
        waiting.put(training)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        made = runs or temporary

        def lane(environment: dict[str, str], prefix: Sequence[str], folder: Path) -> None:
            folder.mkdir(parents=True)
            while True:
                try:
                    training = waiting.get_nowait()
                except Empty:
                    return
                results[training.name] = found = measured(training, folder, environment, prefix)
                said = found.get("error") or f"card {found.get('rank', '–')}" if training.expect else "sound"
                print(f"{len(results)}/{len(chosen)} {training.name}: {said}", flush=True)
                with keeping:
                    keep({training.name: found})

        lanes = [
            threading.Thread(target=lane, args=(environment, prefix, Path(made) / f"lane-{number}"), daemon=True)
            for number, (environment, prefix) in enumerate(_lanes(machine, lanes_on_cpu))
        ]
        try:
            for thread in lanes:
                thread.start()
            for thread in lanes:
                thread.join()
        except KeyboardInterrupt:  # what is measured is recorded
            while not waiting.empty():
                waiting.get_nowait()
            print(f"interrupted: {len(results)} of {len(chosen)} are recorded", flush=True)
    return dict(results)


def _lanes(machine: str, lanes_on_cpu: int = 1) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The environment and the command's prefix for each of the trainings that run side by side, each with its share of the cores."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    if machine == "cpu":
        devices = [""] * lanes_on_cpu
    else:
        import torch

        gpus = torch.cuda.device_count()
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = named if len(named) == gpus else [str(gpu) for gpu in range(gpus)]
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // len(devices))
    for lane, device in enumerate(devices):
        mine = ",".join(map(str, cores[lane * share : (lane + 1) * share]))
        yield {**environment, "CUDA_VISIBLE_DEVICES": device}, ["taskset", "-c", mine] if len(devices) > 1 else []


def device(run: Path) -> tuple[str, str]:
    """The GPU ("" on a CPU) and the torch that a run was made with."""
    found = json.loads((run / "profile.json").read_text(encoding="utf-8"))["environment"]
    return found.get("gpu_name", ""), found.get("torch", "")


def record(
    machine: str, results: dict[str, Any], chosen: Sequence[Training], made_on: tuple[str, str] | None = None
) -> None:
    """Put the results beside those that are on record; `made_on`: as `device` says, this machine where it is not given."""
    import torch

    path = RECORDS / f"{machine}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"trainings": {}}
    expect = {training.name: list(training.expect) for training in chosen}
    for name, found in results.items():
        before["trainings"][name] = {"expect": expect[name], **found}
    gpu, version = made_on or (torch.cuda.get_device_name() if machine == "gpu" else "", torch.__version__)
    document = {
        "device": gpu,
        "torch": version,
        "date": datetime.date.today().isoformat(),
        "trainings": dict(sorted(before["trainings"].items())),
    }
    RECORDS.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def join(machine: str, other: dict[str, Any]) -> None:
    """Take over the trainings of a record that was made elsewhere; trainings measured on another device are no longer on record."""
    path = RECORDS / f"{machine}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    same = (before.get("device"), before.get("torch")) == (other["device"], other["torch"])
    trainings = {**(before["trainings"] if same else {}), **other["trainings"]}
    path.write_text(
        json.dumps({**other, "trainings": dict(sorted(trainings.items()))}, indent=1) + "\n", encoding="utf-8"
    )


def page() -> str:
    """The page, from what is on record."""
    lines = [
        "# Is the cause the first card?",
        "",
        "Small trainings with one planted cause each, in several loop styles, profiled as a user would; made by `tests/causes/causes_page.py`.",
        "Found: one of the cause's rules is on the first or the second card of the report. Where only the user can make the cure, the",
        "training has its fault by turns, in one process, and says what it costs: the middle of that is held to the card's interval.",
        "Of the sound ones, tuned by hand already, the first card is true where the change it names was switched by turns and gained what",
        "the interval says; false where it gained something else, could not be measured, or asks the user for something.",
    ]
    for path in sorted(RECORDS.glob("*.json")):
        lines += _section(path.stem, json.loads(path.read_text(encoding="utf-8")))
    return "\n".join(lines) + "\n"


def _section(machine: str, made: dict[str, Any]) -> list[str]:
    planted = {n: t for n, t in made["trainings"].items() if t["expect"]}
    found = [t for t in planted.values() if t.get("rank") in (1, 2)]
    priced = {n: t for n, t in planted.items() if t.get("cost") is not None and _known(t["cost"])}
    unknown = [n for n, t in planted.items() if t.get("cost") is not None and n not in priced]
    inside = [t for t in priced.values() if _inside(t)]
    lines = [
        "",
        f"## {made['device'] or 'CPU'}",
        "",
        f"torch {made['torch']}, {made['date']}. Found: {len(found)} of {len(planted)}. "
        f"Cost inside the predicted interval: {len(inside)} of {len(priced)}."
        + (f" Too uncertain to be held to one: {', '.join(unknown)}." if unknown else ""),
        "",
        "| training | wanted | card | first card | second card | cost of the step (95 %) | predicted |",
        "|---|---|---:|---|---|---:|---:|",
    ]
    for name, training in planted.items():
        lines.append(_row(name, training))
    return lines + _cured(made["trainings"]) + _sound(made["trainings"])


def _cured(trainings: dict[str, Any]) -> list[str]:
    cured = {n: t for n, t in trainings.items() if n.endswith(CURED)}
    if not cured:
        return []
    still = [
        n
        for n, t in cured.items()
        if rank(trainings.get(n.removesuffix(CURED), t)["expect"], t.get("cards", ())) in (1, 2)
    ]
    told = "none is told of it still" if not still else f"still told of it: {', '.join(still)}"
    return ["", f"Of {len(cured)} of them without their fault {told}."]


def _sound(trainings: dict[str, Any]) -> list[str]:
    sound = {n: t for n, t in trainings.items() if not t["expect"] and not n.endswith(CURED)}
    if not sound:
        return []
    judged = {name: judgement(training) for name, training in sound.items()}
    false = [name for name, said in judged.items() if said == FALSE]
    open_ = [name for name, said in judged.items() if said == NOT_JUDGED]
    lines = [
        "",
        f"Sound, {len(sound)}, of which {len(false)} with a false first card and {len(open_)} on a machine too busy to judge:",
        "",
        "| training | first card | predicted | measured (95 %) | so the card is |",
        "|---|---|---:|---:|---|",
    ]
    for name, training in sound.items():
        first = (training.get("cards") or [None])[0]
        gained_ = training.get("gained") or {}
        measured_ = _cost(gained_["share"]) if gained_.get("share") else gained_.get("verdict", "").replace("|", "/")
        lines.append(f"| {name} | {_card(first)} | {_interval(first)} | {measured_} | {judged[name]} |")
    return lines


def _inside(training: dict[str, Any]) -> bool:
    predicted = (training.get("expected") or {}).get("predicted")
    return bool(predicted) and predicted[0] <= training["cost"][1] <= predicted[1]


def _known(cost: Sequence[float]) -> bool:
    """Whether a cost is known well enough to be held to what was predicted."""
    low, middle, high = cost
    return (high - low) / 2 <= max(UNSURE_FRAC, UNSURE_COST * abs(middle))


def judgement(training: dict[str, Any]) -> str:
    """Whether a sound training's first card is true: what it promises was measured by turns, and lies in its interval."""
    card = (training.get("cards") or [None])[0]
    if "error" in training:
        return NOT_JUDGED
    if card is None:
        return NO_PROMISE
    if training.get("disturbed"):
        return NOT_JUDGED
    if not card["transform"]:
        return FALSE
    if not _promises(card):
        return NO_PROMISE
    share = (training.get("gained") or {}).get("share")
    predicted = card["predicted"]
    return TRUE if share and predicted and predicted[0] <= share[1] <= predicted[1] else FALSE


def _row(name: str, training: dict[str, Any]) -> str:
    if "error" in training:
        return f"| {name} | {' or '.join(training['expect'])} | – | {training['error'].splitlines()[-1]} | | | |"
    cards = [*training["cards"], None, None]
    cost = _cost(training["cost"]) if training.get("cost") else ""
    place = str(training["rank"] or "none")
    return (
        f"| {name} | {' or '.join(training['expect'])} | {place} | {_card(cards[0])} | {_card(cards[1])} | {cost} | "
        f"{_interval(training['expected'])} |"
    )


def _cost(share: Sequence[float]) -> str:
    low, middle, high = share
    return f"{middle:.0%} ({low:.0%} to {high:.0%})"


def _card(card: dict[str, Any] | None) -> str:
    return card["rules"][0] if card else ""


def _interval(card: dict[str, Any] | None) -> str:
    predicted = (card or {}).get("predicted")
    return f"{predicted[0]:.0%} to {predicted[1]:.0%}" if predicted else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=("cpu", "gpu"), help="profile the trainings for this machine")
    parser.add_argument("--read", choices=("cpu", "gpu"), help="read what --runs holds of them")
    parser.add_argument("--join", nargs=2, metavar=("MACHINE", "FILE"), help="take over what was recorded elsewhere")
    parser.add_argument("--only", default="", help="a pattern that the names of those to run match")
    parser.add_argument(
        "--lanes", type=int, default=1, help="on a CPU: so many at once, each with its share of the cores"
    )
    parser.add_argument("--runs", type=Path, help="keep the run folders in this one")
    parser.add_argument(
        "--cases", type=Path, action="append", default=[], help="a folder of trainings that say what they EXPECT"
    )
    given = parser.parse_args()
    machine = given.run or given.read
    chosen = [t for t in trainings(machine, given.cases) if re.search(given.only, t.name)] if machine else []
    if given.run:
        run(machine, chosen, given.runs, lambda results: record(machine, results, chosen), given.lanes)
    elif given.read:
        kept = {path.parent.name: path.parent for path in given.runs.rglob("findings.json")}
        chosen = [t for t in chosen if t.name in kept]
        record(machine, {t.name: read(t, kept[t.name]) for t in chosen}, chosen, device(next(iter(kept.values()))))
    if given.join:
        join(given.join[0], json.loads(Path(given.join[1]).read_text(encoding="utf-8")))
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
