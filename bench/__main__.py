"""The workshop's one command.

python -m bench list [NAME]                        measurements, or one with its options
python -m bench run NAME [--set OPTION=VALUE ...] [--out FILE]
python -m bench run NAME NAME ... --out FOLDER     each in its own process
python -m bench run --stale [NAME ...]             again whatever is not current in bench/results
python -m bench table [--write | --check]          the tables of README and docs/results.md, README's plot
python -m bench ledger [--check]                   the generated pages of docs/ and the store's index
python -m bench print format-costs | memory        a computed table of docs/numerics.md or docs/install.md
python -m bench lines [--largest N]                lines of our own text that a wheel ships, by room and file type
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = p.add_subparsers(dest="command", required=True)
    lists = commands.add_parser("list", help="name the measurements, or describe one")
    lists.add_argument("name", nargs="?")
    runs = commands.add_parser("run", help="measure")
    runs.add_argument("names", nargs="*", metavar="NAME")
    runs.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", dest="settings")
    runs.add_argument("--stale", action="store_true", help="only what has no current receipt; without names: routine")
    runs.add_argument("--out", type=Path, help="a receipt, or a folder of receipts")
    table = commands.add_parser("table", help="the tables of README and docs/results.md, README's plot")
    table.add_argument("--write", action="store_true", help="write them")
    table.add_argument("--check", action="store_true", help="write nothing; 1 where one is out of date")
    ledger = commands.add_parser("ledger", help="the generated pages of docs/")
    ledger.add_argument("--check", action="store_true", help="write nothing; 1 where a page is out of date")
    prints = commands.add_parser("print", help="a computed table of docs/numerics.md or docs/install.md")
    prints.add_argument("name", choices=("format-costs", "memory"))
    lines = commands.add_parser("lines", help="lines of our own text that a wheel ships")
    lines.add_argument("--largest", type=int, default=0, metavar="N", help="also the N largest files")
    child = commands.add_parser("child")  # for the workshop's own processes
    child.add_argument("function")
    child.add_argument("arguments")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command == "child":
        module, _, name = args.function.partition(":")
        print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(args.arguments)), default=str))
        return 0
    from halfbyte.errors import HalfbyteError

    try:
        return _dispatch(args)
    except HalfbyteError as e:
        print(e, file=sys.stderr)
        return e.exit_code


def _dispatch(args: argparse.Namespace) -> int:
    from bench import catalog, ledger, lines, runner, table
    from bench.measurement import MEASUREMENTS, RESULTS
    from halfbyte.errors import UsageError

    if args.command == "lines":
        return lines.main(args.largest)
    if args.command == "print":
        from bench import format_costs, memory_table
        from halfbyte.architectures import ARCHES

        table_lines = (
            memory_table.memory_table(ARCHES["sm86"])
            if args.name == "memory"
            else format_costs.table(format_costs.measure())
        )
        print("\n".join(table_lines))
        return 0
    catalog.load()
    if args.command == "table":
        return table.main(write=args.write, check=args.check)
    if args.command == "ledger":
        return ledger.main(check=args.check)
    if args.command == "list":
        if args.name:
            describe(args.name)
        else:
            for m in MEASUREMENTS.values():
                print(f"{m.name:22} {m.seconds:6.0f} s  {', '.join(m.needs) or 'cpu':24} {summary(m.name)}")
        return 0
    if len(args.names) == 1 and not args.stale:
        (name,) = args.names
        out = args.out / f"{name}.json" if args.out is not None and args.out.is_dir() else args.out
        return runner.run_one(runner.measurement_named(name), args.settings, out)
    if args.settings:
        raise UsageError("--set is for one measurement; name it alone.")
    if not args.names and not args.stale:
        raise UsageError("name a measurement, or add --stale for all that are not current.")
    if args.out is None and not args.stale:
        raise UsageError("several measurements need a folder for their receipts; add --out FOLDER.")
    folder = args.out or RESULTS
    failed = runner.run_many(args.names, folder, stale=args.stale, report=lambda text: print(text, flush=True))
    print(f"failed: {', '.join(failed)}; their logs are in {folder}" if failed else "no measurement failed")
    return 1 if failed else 0


def summary(name: str) -> str:
    from bench.measurement import MEASUREMENTS

    m = MEASUREMENTS[name]
    if m.command_line:
        return m.command
    text = m.function.__doc__ or sys.modules[m.module].__doc__ or ""
    return text.strip().splitlines()[0]


def describe(name: str) -> None:
    from bench.measurement import value_text
    from bench.runner import measurement_named

    m = measurement_named(name)
    print(f"{m.name}: at most {m.seconds:.0f} s; needs {', '.join(m.needs) or 'a CPU'}\n")
    print(m.command if m.command_line else (sys.modules[m.module].__doc__ or "").strip())
    for f in dataclasses.fields(m.options):
        text = f"{f.name}={value_text(m.settings.get(f.name, f.default))}"
        print(f"    --set {text:<40} {f.metadata.get('help', '')}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
