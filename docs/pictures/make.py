"""Pictures of the docs, from a recorded run: `python docs/pictures/make.py RUN` writes report.png and timeline.png beside this file.

Needs Chromium. RUN is a run's folder with its trace; the pictures on file are of imagenet.py --arch resnet50 -b 64 --device-data
of docs/examples on an H200.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Picture → its size, and the sections that are left out of it.
PICTURES = {
    "report.png": (1240, 900, ""),
    "timeline.png": (1240, 560, "header > *, #findings, #time, .tiles { display: none !important }"),
}


def main(run: str) -> None:
    """Render the report of this run, and take the pictures."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium here")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "advisor", "report", run, "--html", str(page)], check=True)
        text = page.read_text(encoding="utf-8")
        for name, (width, height, style) in PICTURES.items():
            page.write_text(text.replace("</style>", f"{style}</style>", 1), encoding="utf-8")
            words = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            words += [f"--window-size={width},{height}", "--virtual-time-budget=5000", f"--screenshot={HERE / name}"]
            subprocess.run([*words, page.as_uri()], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main(sys.argv[1])
