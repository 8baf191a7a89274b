"""`python -m tests.soak --kills N --seed S`: N plans, their figures as they pass, a table and a verdict."""

import argparse
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path

from tests.soak.campaign import References, clear, run_plan
from tests.soak.plan import Plan, draw_kill


def main() -> int:
    """1 when any plan failed; what failed stays in the folder for a look."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="plans to carry out, each with one death or two")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first plan; the next plan's is one more")
    parser.add_argument("--folder", type=Path, default=None, help="where runs are kept; a temporary folder by default")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="soak_"))
    seconds: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, list[int]] = defaultdict(list)
    references = References(folder / "references")
    for seed in range(given.seed, given.seed + given.kills):
        plan, began_s = draw_kill(seed), time.monotonic()
        problem = try_plan(plan, folder / f"seed_{seed}", references)
        seconds[plan.point].append(time.monotonic() - began_s)
        if problem:
            failed[plan.point].append(seed)
        report(plan, seconds[plan.point][-1], problem)
    print_table(seconds, failed)
    total = sum(len(seeds) for seeds in failed.values())
    if total:
        print(f"what failed is in {folder}; again: python -m tests.soak --kills 1 --seed SEED")
    else:
        clear(folder)
    print(f"{given.kills - total} passed, {total} failed")
    return int(total > 0)


def try_plan(plan: Plan, folder: Path, references: References) -> str:
    """The error's words, or none; a plan that passed leaves nothing."""
    try:
        run_plan(plan, folder, references)
    except Exception:
        return traceback.format_exc()
    clear(folder)
    return ""


def report(plan: Plan, seconds: float, problem: str) -> None:
    """A line a plan; the plan in full and the error where it failed."""
    setting = plan.setting
    saves = "async" if setting.asynchronous else "sync"
    places = " then ".join(f"{kill.point}/{kill.place}#{kill.occurrence}" for kill in plan.kills)
    verdict = "FAILED" if problem else "passed"
    print(f"seed {plan.seed:>4} {verdict} {seconds:5.1f} s  {setting.describe()} {saves}  {places}", flush=True)
    if problem:
        print(f"{plan}\n{problem}", flush=True)


def print_table(seconds: dict[str, list[float]], failed: dict[str, list[int]]) -> None:
    """By point: plans, failures, seconds, failed seeds."""
    print(f"\n{'point':<22}{'plans':>6}{'failed':>8}{'mean s':>8}  seeds that failed")
    for point, all_ in seconds.items():
        seeds = ", ".join(str(seed) for seed in failed[point])
        print(f"{point:<22}{len(all_):>6}{len(failed[point]):>8}{sum(all_) / len(all_):>8.1f}  {seeds}")


if __name__ == "__main__":
    sys.exit(main())
