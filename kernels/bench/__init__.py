"""Timings of every operator on a GPU, beside their bounds and their peers: `python -m kernels.bench --help`.

- `__main__.py`: the command line.
- `gate.py`: the operators are right on short rows, or nothing is timed.
- `bounds.py`: bytes and FLOPs counted, and the ceilings that the machine reaches.
- `cases.py`: shapes, inputs and the work that is timed. `decode.py`: the same for one token.
- `peers.py`: other people's operators on the same inputs.
- `measure.py`: medians, quantiles and memory.
- `report.py`: the machine, the table, the JSON.
"""
