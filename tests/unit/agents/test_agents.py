"""Calls for coding agents: short answers from recorded ones, the skill's commands, and the MCP server where its SDK is there."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path

import click
import pytest
import samples
import yaml

from advisor.agents.calls import AgentCalls
from advisor.agents.server import INSTRUCTIONS, server
from advisor.cli.main import COMMANDS, cli
from advisor.core.errors import AdvisorError
from advisor.core.storage import to_plain
from advisor.reporting.machine import report_json
from advisor.rules import load

REPO = Path(__file__).resolve().parents[3]
SKILL, ACTION = REPO / "skills" / "advisor" / "SKILL.md", REPO / "github-action" / "action.yml"


class Recorded:
    """Stands for the command line: answers as recorded, by the command; and what was asked."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def __call__(self, words, folder):
        self.asked.append(list(words))
        if words[0] == "try" and "--patch" in words:
            self.patch = Path(words[words.index("--patch") + 1]).read_text()
        code, document = self.answers.get(words[0], (0, None))
        return code, json.dumps(document) if document is not None else "", "said on stderr"


RUN = report_json(samples.resnet50(), samples.findings(), samples.trials())
KEPT = {"schema_version": 1, "type": "attempt", **to_plain(samples.attempt())}


def test_an_agent_goes_from_the_first_card_to_a_proved_patch(tmp_path):
    """Profile, read the first card, try an edit of one's own, take its verdict: as the skill says."""
    run = Recorded(profile=(0, None), report=(0, RUN), **{"try": (0, KEPT)})
    calls = AgentCalls(tmp_path, run)
    found = calls.profile("train.py", ["--lr", "0.1"])
    assert run.asked[0][:2] == ["profile", "-q"]
    assert run.asked[0][-3:] == ["train.py", "--lr", "0.1"]
    first = found["cards"][0]
    assert (first["rank"], first["change"], first["where"]) == (1, "amp_bf16", ["layer1.0.conv2", "layer2.0.conv2"])
    assert 0 < first["saves_low"] < first["saves_high"] < 1
    verdict = calls.try_patch("--- a/x\n+++ b/x", "train.py")
    assert run.patch == "--- a/x\n+++ b/x\n"
    assert (verdict["verdict"], verdict["exit_code"], verdict["speedup"]) == ("kept", 0, 2.0)


def test_answers_are_short(tmp_path):
    calls = AgentCalls(tmp_path, Recorded(report=(0, RUN)))
    assert len(json.dumps(RUN)) > 100_000
    assert len(json.dumps(calls.profile("train.py"))) < 8_000
    applied = calls.apply("train.py")
    assert len(json.dumps(applied)) < 8_000
    assert applied["speedup"] == pytest.approx(3.10, abs=0.01)
    assert {v["status"] for v in applied["verdicts"]} >= {"kept", "reverted"}


def test_what_fails_is_told(tmp_path):
    error = {"schema_version": 1, "type": "error", "text": "no run", "fix": "Look."}
    calls = AgentCalls(tmp_path, Recorded(profile=(7, None), report=(2, error), compare=(3, None)))
    failed = calls.profile("train.py")
    assert (failed["type"], failed["exit_code"], failed["said"]) == ("error", 7, "said on stderr")
    assert failed["text"] == "no run"

    def missing(words, folder):
        return 2, json.dumps(error), "advisor: no script gone.py; expected a file.\n"

    assert AgentCalls(tmp_path, missing).profile("gone.py")["text"] == "no script gone.py; expected a file."
    assert calls.compare("a", "b") == {"type": "error", "text": "said on stderr", "exit_code": 3}


def test_a_patch_is_not_told_by_the_file_that_it_was_put_into(tmp_path):
    def refused(words, folder):
        text = f"{words[words.index('--patch') + 1]} changes x.py, which is not in {folder}"
        return 2, json.dumps({"schema_version": 1, "type": "error", "text": text}), ""

    said = AgentCalls(tmp_path, refused).try_patch("--- a/x.py", "train.py")
    assert said["text"] == f"the patch changes x.py, which is not in {tmp_path}"


def test_a_rule_is_explained(tmp_path):
    run = Recorded(rules=(0, {"type": "rule", "id": "x", "title": "X", "text": "why", "path": "/p", "transform": ""}))
    assert AgentCalls(tmp_path, run).explain("x")["text"] == "why"


def commands() -> list[str]:
    """Those of the skill, and those of the action for GitHub."""
    blocks = re.findall(r"```sh\n(.*?)```", SKILL.read_text(encoding="utf-8"), re.DOTALL)
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    blocks += [step["run"].replace("python -m advisor", "advisor") for step in action["runs"]["steps"] if "run" in step]
    lines = (re.split(r" \||>", line)[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line.startswith("advisor ")]


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_skill_and_the_action_parses(line):
    words = [word.replace("$FAIL_ON", "high") for word in shlex.split(line)[1:]]
    assert words[0] in COMMANDS
    command, context = cli, click.Context(cli, **cli.context_settings)
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
        context = click.Context(command, info_name=name, parent=context, **command.context_settings)
    command.parse_args(context, words)


def test_the_skill_names_rules_and_verdicts_that_are_there():
    text = SKILL.read_text(encoding="utf-8")
    named = set(re.findall(r"rules show ([\w-]+)", text))
    assert named
    assert named <= {rule.id for rule in load()}
    assert re.match(r"---\nname: advisor\ndescription: .+\n---\n", text)


def test_the_server_has_its_tools_and_answers(tmp_path):
    pytest.importorskip("mcp")
    found = server(AgentCalls(tmp_path, Recorded(**{"try": (0, KEPT)})))
    tools = asyncio.run(found.list_tools())
    assert {tool.name for tool in tools} == {"profile", "explain", "try_change", "try_patch", "apply", "compare"}
    assert all(tool.name in INSTRUCTIONS for tool in tools if tool.name not in ("explain", "compare"))
    answer = asyncio.run(found.call_tool("try_change", {"change": "tf32", "script": "train.py"}))
    assert "kept" in str(answer)


def test_without_the_sdk_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mcp.server.mcpserver", None)
    with pytest.raises(AdvisorError, match=r"cnn-advisor\[mcp\]"):
        server(AgentCalls(tmp_path))
