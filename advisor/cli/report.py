"""`advisor report`."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

import click

from advisor.cli import output
from advisor.cli.help import Command
from advisor.cli.parameters import format_option, run_argument
from advisor.core.errors import AdvisorError
from advisor.core.storage import write_text


@click.command(cls=Command)
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Write the HTML report to FILE; - is stdout, as --format html.",
)
@click.option("--open", "open_it", is_flag=True, help="Open the HTML report in a browser.")
@click.option("--explain", is_flag=True, help="In text, show each condition of each finding with its value.")
@format_option("text", "json", "md", "html", "perfetto", "sarif")
@run_argument
def report(run: str, *, html_file: Path | None, open_it: bool, explain: bool, form: str) -> None:
    """Show a recorded run again. RUN is a run's folder, its name, or `last` (the default).

    \b
    Examples:
      advisor report last
      advisor report last --open
      advisor report advisor-runs/train-20261120-1 --html out.html
      advisor report last --format md >> "$GITHUB_STEP_SUMMARY"
      advisor report last --format perfetto > trace.json
      advisor report last --format sarif > advisor.sarif

    `perfetto` writes the traced steps for ui.perfetto.dev and chrome://tracing, with findings as annotations. `sarif` writes the
    findings that name a line of your source, for code scanning.
    """
    from advisor import runs

    if str(html_file) == "-":
        html_file, form = None, "html"
    elif (html_file or open_it) and form not in ("text", "html"):
        raise click.UsageError(f"a page and {form} exclude each other; name one", click.get_current_context())
    proof = runs.load_proof(run)
    if proof is not None:
        if html_file or open_it or form in ("html", "perfetto", "sarif"):
            raise AdvisorError(
                f"{run} holds a plan's proof and no profile, so there is no page or trace of it",
                fix="Use --format text, json or md.",
            )
        output.say(output.proof_text(form, proof, run_dir=Path(run), stream=sys.stdout), sys.stdout)
        return
    loaded = runs.load_run(run)
    if html_file or open_it:
        path = output.writable(html_file or loaded.run_dir / "report.html")
        page = output.run_text(
            "html", loaded.profile, loaded.findings, loaded.trials, stream=sys.stdout, run_dir=loaded.run_dir
        )
        write_text(path, page)
        output.say(f"Report {path}")
        if open_it and not webbrowser.open(path.resolve().as_uri()):
            output.say("No browser could be started; open the file above.")
        return
    text = output.run_text(
        form, loaded.profile, loaded.findings, loaded.trials, stream=sys.stdout, explain=explain, run_dir=loaded.run_dir
    )
    output.say(text, sys.stdout)
    if form == "text":
        if audit := output.precision_text(loaded.run_dir, loaded.profile):
            output.say(f"\n{audit}", sys.stdout)
        output.say(output.files_text(loaded.run_dir), sys.stdout)
