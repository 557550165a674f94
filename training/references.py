"""What level 2 of `halfbyte check` knows of the embedded model: its answers, and its scores of long prompts.

`PYTHONPATH=src:training python training/references.py` on any machine after a release; ten minutes or so. Writes
src/halfbyte/lab/levels/references. Answers and the scores of the far prompt come from the CPU kernels in float32, all
other scores from the reference kernels, which round nowhere.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from halfbyte.gates import parse
from halfbyte.lab import check
from halfbyte.lab.levels import scores
from halfbyte.lab.options import CheckOptions

FLOAT32 = parse({"activation": "f32", "kv_dtype": "f32"}, env={})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("src/halfbyte/lab/levels/references"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(args.out, Path(folder))


def write(out: Path, folder: Path) -> None:
    options = CheckOptions(device="cpu", gates=parse({"activation": "f32"}, env={}), out=folder)
    reference = check.write_reference(options, out / "tiny.json", print)
    print(f"{reference.right} of {len(reference.answers)} right")
    rows: list[tuple[float, ...]] = []
    prompts: list[tuple[int, ...]] = []
    for gates, far in ((scores.REFERENCE, False), (FLOAT32, True)):
        subject = check.subject_of(CheckOptions(device="cpu", gates=gates, out=folder), print)
        asked = scores.table_prompts(subject)
        with subject.process("scores") as engine:
            table = scores.score_table(subject, engine.asker, asked[-1:] if far else asked[:-1])
        prompts += table.prompts
        rows += table.scores
    scores.Table(table.model, tuple(prompts), tuple(rows)).write(out / "tiny.scores.json")


if __name__ == "__main__":
    main()
