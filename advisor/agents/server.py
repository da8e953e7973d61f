"""advisor as an MCP server on stdin and stdout, for coding agents: `advisor-mcp`, or `python -m advisor.agents.server`.

Needs the extra `mcp`. It opens no connection, and runs the scripts that it is told to, in the folder that it was started in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from advisor import __version__
from advisor.agents.calls import AgentCalls, Answer
from advisor.core.errors import AdvisorError

INSTRUCTIONS = """\
Make PyTorch CNN training faster, with proof. First `profile` the training script: its cards name the causes, the best first. Then
`try_change` the change a card names, or write your own edit as a diff and `try_patch` it. Keep only what comes back with verdict
"kept": it took effect, trains the same and is faster beyond noise. "inconclusive" means that noise hid the answer; try again on a
quiet machine. `apply` does the whole search by itself. The script is never edited, and what it writes is put back.
"""


def server(calls: AgentCalls) -> Any:
    """The server with its tools.

    Raises:
        AdvisorError: without the package `mcp`.
    """
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError:
        raise AdvisorError("the package mcp is not installed", fix="pip install 'cnn-advisor[mcp]'") from None
    found = MCPServer("advisor", instructions=INSTRUCTIONS, version=__version__)

    @found.tool()
    def profile(script: str, arguments: list[str] | None = None) -> Answer:
        """Measure some training steps of a script: where the time goes and what would help, the best first. Takes about a minute."""
        return calls.profile(script, arguments or ())

    @found.tool()
    def explain(rule: str) -> Answer:
        """Explain a rule that a card names: what it looks for, why, and what to do by hand."""
        return calls.explain(rule)

    @found.tool()
    def try_change(change: str, script: str, arguments: list[str] | None = None, max_time: str = "5m") -> Answer:
        """Try one of advisor's changes on the script: verdict "kept" means right and faster beyond noise."""
        return calls.try_change(change, script, arguments or (), max_time)

    @found.tool()
    def try_patch(patch: str, script: str, arguments: list[str] | None = None, max_time: str = "5m") -> Answer:
        """Try a unified diff of the source, on a copy: verdict "kept" means loaded, training the same, and faster beyond noise."""
        return calls.try_patch(patch, script, arguments or (), max_time)

    @found.tool()
    def apply(script: str, arguments: list[str] | None = None, max_time: str = "10m") -> Answer:
        """Search for all changes that make the script faster, and prove them together. Takes up to max_time."""
        return calls.apply(script, arguments or (), max_time)

    @found.tool()
    def compare(a: str, b: str) -> Answer:
        """Compare two recorded runs by their folders: step time with an interval, kernels, memory."""
        return calls.compare(a, b)

    return found


def main() -> None:
    """Serve until stdin closes."""
    server(AgentCalls(Path.cwd())).run()


if __name__ == "__main__":
    main()
