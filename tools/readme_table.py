"""Put the table of the recorded run into the READMEs: `python tools/readme_table.py [--check]`.

The figures come from benchmarks/results/cpu-quick.json, which `make record` writes; none is typed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from xmem.report.compare import compare_techniques
from xmem.report.model import Report, read_json

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "benchmarks" / "results" / "cpu-quick.json"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEADINGS = {
    "README.md": ("workload", "technique", "PyTorch", "Jittor"),
    "README.zh-CN.md": ("模型", "技术", "PyTorch", "Jittor"),
}


def table(report: Report, headings: tuple[str, ...]) -> str:
    """Return bytes above static for each workload and technique, side by side."""
    results = {(r.case.workload, r.case.technique, r.case.backend): r for r in report.results}
    savings = {
        (c.result.case.workload, c.result.case.technique, c.result.case.backend): c
        for c in compare_techniques(report)
    }
    rows = []
    for workload, technique in dict.fromkeys((w, t) for w, t, _ in results):
        cells = []
        for backend in ("torch", "jittor"):
            key = (workload, technique, backend)
            result = results.get(key)
            if result is None or result.peak_above_static_bytes is None:
                cells.append("-" if result is None else result.status)
                continue
            text = f"{result.peak_above_static_bytes / 2**20:.2f} MiB"
            saving = savings[key].above_static_saving_factor if key in savings else None
            cells.append(f"{text} ({saving:.2f}x)" if saving else text)
        rows.append(f"| {workload} | {technique} | {' | '.join(cells)} |")
    head = [f"| {' | '.join(headings)} |", "| --- | --- | ---: | ---: |"]
    return "\n".join([*head, *rows])


def filled(text: str, inner: str) -> str:
    """Return a README with the table between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{inner}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the tables, or check that they are the recorded ones."""
    report = read_json(RECORDED, Report)
    stale = []
    for name, headings in HEADINGS.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        new = filled(text, table(report, headings))
        if new != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(new, encoding="utf-8")
    if stale and "--check" in arguments:
        print(f"{', '.join(stale)}: the table is not the recorded run's. Run tools/readme_table.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
