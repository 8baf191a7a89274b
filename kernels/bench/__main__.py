"""The command line: check the operators, say the bounds, time everything, print a table and JSON."""

import argparse
import json
import sys
from pathlib import Path

OPERATORS = ("scan", "lengths", "step", "short_conv", "gated_norm")
DESCRIPTION = """Time the operators on this GPU, beside their bounds and their peers.

First each operator is checked against fp64 on short rows; a wrong one is not timed. Then come the machine, the bounds
(bytes moved over the bandwidth of a copy, FLOPs over a matrix product's rate, both measured in the same run), and a
table: medians with 20/80 quantiles in ms, the bound as a share of the time, peak memory of forward + backward with its
inputs, memory kept for the backward over the inputs, and the ratio to the peer (below 1: faster than the peer). The
last line is the same as JSON. A peer that is missing or refuses is named as absent, with the reason."""
EXAMPLE = """example:
  python -m kernels.bench --operator scan --shape 1x32768x16 --solver-steps 1 2 --json bench.json"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--operator", nargs="+", choices=OPERATORS, default=OPERATORS, metavar="NAME",
                        help=f"what to time, of {', '.join(OPERATORS)} (default: all). lengths is the scan from 2K to "
                        "1M tokens a row; step is one decode token, in a CUDA graph and eager")  # fmt: skip
    parser.add_argument("--shape", nargs="+", type=parse_shape, metavar="BxTxH",
                        help="shapes of the scan: batch x tokens x heads (default: 1x32768x16 8x4096x16 "
                        "1x32768x32)")  # fmt: skip
    parser.add_argument("--solver-steps", nargs="+", type=int, choices=range(5), metavar="L",
                        help="solver steps, 0 to 4 (default: all; 1 2 for lengths)")  # fmt: skip
    parser.add_argument("--quick", action="store_true",
                        help="one shape, L = 1 and 2, 20 ms a measurement instead of 200")  # fmt: skip
    parser.add_argument("--no-peers", action="store_true", help="our operators only: no ratios")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON to FILE")
    return parser


def parse_shape(text: str) -> tuple[int, int, int]:
    """Batch, tokens and heads of "BxTxH"."""
    try:
        B, T, H = (int(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be BxTxH, for example 1x32768x16") from None
    if min(B, T, H) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must have sizes of at least 1")
    return B, T, H


def main(arguments: list[str] | None = None) -> int:
    parsed = build_parser().parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("error: kernels.bench needs a CUDA device and finds none; run it on a machine with one", file=sys.stderr)
        return 2
    from kernels.bench.cases import Options

    options = Options(
        operators=tuple(parsed.operator),
        shapes=tuple(parsed.shape) if parsed.shape else None,
        solver_steps=tuple(parsed.solver_steps) if parsed.solver_steps else None,
        has_peers=not parsed.no_peers,
        is_quick=parsed.quick,
    )
    return run(options, parsed.json)


def run(options, json_path: Path | None) -> int:
    """Check, predict, measure, print; 1 if an operator is wrong."""
    from kernels.bench import bounds, cases, gate, report

    machine = report.describe_machine()
    print(report.render_machine(machine))
    wrong = gate.check_operators(options)
    if wrong:
        print("\n".join(f"error: {line}; nothing is timed" for line in wrong), file=sys.stderr)
        return 1
    print("checked: every operator that is timed, against fp64 on short rows")
    ceilings = bounds.measure_ceilings(str(machine["gpu"]))
    print(report.render_ceilings(ceilings))
    listed = list(cases.build_cases(options, ceilings))
    print("\n".join(report.render_bounds(listed)))
    rows = measure_rows(listed)
    text = json.dumps(report.build_report(machine, ceilings, rows))
    if json_path is not None:
        json_path.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def measure_rows(listed: list) -> list:
    """Run the cases in order, each compared with its shape's baseline, and print the table as it grows."""
    from kernels.bench import report

    baselines, rows = {}, []
    print(report.render_header())
    for case in listed:
        measured = case.run()
        group = (case.operator, case.shape)
        if case.is_baseline:
            baselines[group] = measured
        rows.append(report.build_row(case, measured, baselines.get(group)))
        print(report.render_row(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
