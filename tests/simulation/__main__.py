"""python -m tests.simulation SEED [SEED...]   replay schedules, with a trace
python -m tests.simulation --first 0 --count 2000   look for schedules that fail
"""

import argparse
import gc
import sys
import time

from tests.simulation import mutants


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("seeds", type=int, nargs="*", help="replayed with a trace")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--until-failure", action="store_true")
    parser.add_argument("--mutant", choices=sorted(mutants.BY_NAME), help="with a fault put in on purpose")
    parser.add_argument("--situation", help="only this one (see situations.py)")
    args = parser.parse_args()
    if args.mutant is not None:
        mutants.install(args.mutant)
    from tests.simulation.schedule import undisturbed  # only now: it loads the code that is tested

    with undisturbed():
        return search(args)


def search(args: argparse.Namespace) -> int:
    from tests.simulation.schedule import run

    for seed in args.seeds:
        outcome = run(seed, trace=True, situation=args.situation)
        print(*outcome.trace, sep="\n")
        print(f"seed {seed}: {outcome.problem or 'nothing wrong'}")
    began, cpu = time.perf_counter(), time.process_time()
    failed = steps = messages = answers = committed = ran = 0
    virtual_s = 0.0
    for seed in range(args.first, args.first + args.count):
        outcome = run(seed, situation=args.situation)
        ran += 1
        steps, messages = steps + outcome.steps, messages + outcome.messages
        answers, committed = answers + outcome.answers, committed + outcome.committed
        virtual_s += outcome.virtual_s
        if ran % 50 == 0:
            gc.collect()
        if ran % 500 == 0:
            print(f"{ran} schedules, {failed} failed", flush=True)
        if outcome.problem is not None:
            failed += 1
            print(f"seed {seed}: {outcome.problem}\n  replay: {outcome.replay}", flush=True)
            if args.until_failure:
                break
    if ran:
        wall, used = time.perf_counter() - began, time.process_time() - cpu
        print(
            f"{ran} schedules, {failed} failed; {messages} messages, {steps} steps, {committed} rounds, "
            f"{answers} answers, {virtual_s / 3600:.1f} virtual hours; {wall:.1f} s, {used:.1f} s of a core, "
            f"{60 * ran / used:.0f} schedules a minute of one core"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
