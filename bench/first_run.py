"""Run `make demo`'s command as a person sees it, keep its figures as a row, and put its output into the README.

python bench/first_run.py            append a row to results/first_run.jsonl
python bench/first_run.py --readme   and write the README's first screen anew
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ["snugtune", "train", "recipes/demo.yaml"]
KEPT = (
    "device", "allocator", "how", "steps", "rows_used", "eval_rows", "eval_loss_before", "eval_loss_after", "accuracy_before",
    "accuracy_after", "tokens_per_second", "train_seconds", "total_seconds", "predicted_peak_bytes", "measured_peak_bytes",
    "budget_bytes",
)  # fmt: skip


def main() -> None:
    started = time.monotonic()
    screen = on_a_terminal(COMMAND)
    seconds = time.monotonic() - started
    report = json.loads((ROOT / "runs/demo/report.json").read_text())
    row = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "command": " ".join(COMMAND),
        "process_seconds": round(seconds, 1),
    }
    row |= {key: report[key] for key in KEPT}
    with (ROOT / "results/first_run.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(screen)
    if "--readme" in sys.argv:
        readme = ROOT / "README.md"
        block = f"<!-- made by `make report` -->\n```console\n$ make demo\n{screen}\n```\n<!-- end -->"
        text = re.sub(r"<!-- made by `make report` -->.*?<!-- end -->", lambda _: block, readme.read_text(), flags=re.S)
        readme.write_text(text)


def on_a_terminal(command: list[str], columns: int = 110) -> str:
    """What stands on a terminal after `command` has run there, its progress bars in their last state."""
    screen = pyte.Screen(columns, 60)
    stream = pyte.ByteStream(screen)
    primary, secondary = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    binary = Path(sys.executable).parent / command[0]
    process = subprocess.Popen(
        [str(binary), *command[1:]], cwd=ROOT, stdin=secondary, stdout=secondary, stderr=secondary, env=environment
    )
    os.close(secondary)
    while True:
        try:
            data = os.read(primary, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        stream.feed(data)
    if process.wait():
        raise SystemExit("\n".join(line.rstrip() for line in screen.display))
    lines = [line.rstrip().replace(str(ROOT) + "/", "") for line in screen.display]
    return "\n".join(lines).strip("\n")


def put_into_docs(script: str, lines: list[str], *, file: str = "docs/memory.md") -> None:
    """Write these lines where `file` keeps what `script --docs` makes."""
    page, begin = ROOT / file, f"<!-- made by {script} --docs -->"
    block = "\n".join([begin, *lines, "<!-- end -->"])
    page.write_text(re.sub(rf"{re.escape(begin)}.*?<!-- end -->", lambda _: block, page.read_text(), flags=re.S))


def commit() -> str:
    """Short hash of HEAD, with a mark where the tree differs from it."""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "src"], cwd=ROOT).returncode
    return head + "+" * bool(dirty)


if __name__ == "__main__":
    main()
