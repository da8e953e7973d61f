"""What an agent asks of advisor, each a call of the command line whose JSON answer is cut down to what decides the next step.

Each call runs in a process of its own, in the folder that the agent works in. An answer with `type` "error" says what went wrong.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from advisor.core.storage import write_text

Answer = dict[str, Any]
Run = Callable[[Sequence[str], Path], tuple[int, str, str]]  # words and folder → exit code, stdout, stderr

MOST_CARDS, MOST_PLACES, TAIL = 6, 3, 2000


def command_line(words: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Run `advisor` with these words."""
    done = subprocess.run(
        [sys.executable, "-m", "advisor", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


class AgentCalls:
    """The calls, in one folder."""

    def __init__(self, folder: Path, run: Run = command_line) -> None:
        self.folder, self._run = folder, run

    def profile(self, script: str, arguments: Sequence[str] = ()) -> Answer:
        """Measure some training steps of the script; where the time goes, and what would help, the best first."""
        run_dir = f"advisor-runs/agent-{secrets.token_hex(4)}"
        code, _, told = self._run(["profile", "-q", "-o", run_dir, script, *arguments], self.folder)
        found = self._json(["report", run_dir, "--json"])
        if found.get("type") == "error":
            return _failed(code, told, found)
        return {"exit_code": code, "run": run_dir, **_profile(found)}

    def explain(self, rule: str) -> Answer:
        """What a rule looks for, why, and what to do by hand."""
        found = self._json(["rules", "show", rule, "--json"])
        return {key: found[key] for key in ("type", "id", "title", "transform", "text", "fix") if key in found}

    def try_change(self, change: str, script: str, arguments: Sequence[str] = (), max_time: str = "5m") -> Answer:
        """Try one of advisor's changes on the script."""
        return self._json(["try", "--json", "-q", "--max-time", max_time, "--change", change, script, *arguments])

    def try_patch(self, patch: str, script: str, arguments: Sequence[str] = (), max_time: str = "5m") -> Answer:
        """Try a unified diff of the project's source on the script; it is applied to a copy.

        Args:
            patch: the text of the diff.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "idea.patch"
            write_text(file, patch if patch.endswith("\n") else f"{patch}\n")
            words = ["try", "--json", "-q", "--max-time", max_time, "--patch", str(file), script, *arguments]
            found = self._json(words)
            # The file is gone as the answer comes, and was never the agent's.
            return {key: _renamed(value, str(file)) for key, value in found.items()}

    def apply(self, script: str, arguments: Sequence[str] = (), max_time: str = "10m") -> Answer:
        """Search: try all that helps, keep what is proved; the plan, its speed-up and the verdict on each change."""
        run_dir = f"advisor-runs/agent-{secrets.token_hex(4)}"
        words = ["apply", "--auto", "-q", "-o", run_dir, "--max-time", max_time, script, *arguments]
        code, _, told = self._run(words, self.folder)
        found = self._json(["report", run_dir, "--json"])
        if found.get("type") == "error":
            return _failed(code, told, found)
        return {"exit_code": code, "run": run_dir, "plan": f"{run_dir}/plan.yaml", **_applied(found)}

    def compare(self, a: str, b: str) -> Answer:
        """Run B beside run A, by their folders."""
        return self._json(["compare", a, b, "--json"])

    def _json(self, words: Sequence[str]) -> Answer:
        code, out, told = self._run(words, self.folder)
        try:
            found = json.loads(out)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            return {"type": "error", "text": told[-TAIL:].strip() or "no answer", "exit_code": code}
        return {**found, "exit_code": code}


def _renamed(value: Any, file: str) -> Any:
    return value.replace(file, "the patch") if isinstance(value, str) else value


def _failed(code: int, told: str, found: Answer) -> Answer:
    """Why there is no run to report: what the command said, not that its folder is missing."""
    said = [line.removeprefix("advisor: ") for line in told.splitlines() if line.startswith("advisor: ")]
    return {"type": "error", "text": said[-1] if said else found["text"], "exit_code": code, "said": told[-TAIL:]}


def _profile(found: Answer) -> Answer:
    summary = found["summary"]
    by_rule = {finding["rule"]: finding for finding in (found["findings"] or {"findings": ()})["findings"]}
    cards = []
    for card in summary["cards"][:MOST_CARDS]:
        finding = by_rule.get(card["rule"], {})
        gain = card["predicted"] or {}
        cards.append(
            {
                "rank": card["rank"],
                "rule": card["rule"],
                "title": card["title"],
                "says": finding.get("message", ""),
                "saves_low": gain.get("low"),
                "saves_high": gain.get("high"),
                "change": card["transform"],
                "where": finding.get("sites", [])[:MOST_PLACES],
            }
        )
    kept = ("headline", "step_us", "samples_per_s", "limit_frac")
    causes = [{key: cause[key] for key in ("label", "time_us", "frac")} for cause in summary["causes"]]
    return {"type": "profile", **{key: summary[key] for key in kept}, "causes": causes, "cards": cards}


def _applied(found: Answer) -> Answer:
    summary = found["summary"] or {}
    trials = found["trials"] or {"verdicts": ()}
    verdicts = [{key: v[key] for key in ("transform", "status", "reason")} for v in trials["verdicts"]]
    kept = ("headline", "kept", "speedup", "speedup_low", "speedup_high")
    return {"type": "applied", **{key: summary.get(key) for key in kept}, "verdicts": verdicts}
