"""How many page faults does a steady training step take?

Memory that a step frees and the next one needs again should still be there: a fault costs 0.1 to 0.6 s per GB. Minor
faults of the process are counted over whole turns of the loop, so the figure does not depend on the machine's noise.
"""

from __future__ import annotations

from benchmarks.common import Report, measure, parser
from benchmarks.contestants import Bench, add_arguments, longer

FAULTS_MARK = 1000


def main() -> None:
    """Count, print and write."""
    parsed = parser(__doc__, rounds=3, disk=True)
    add_arguments(parsed, warmup=6)
    parsed.add_argument("--tokens", type=int, nargs="+", default=[128], help="tokens in a step (default 128)")
    parsed.add_argument("--tier", nargs="+", choices=["nvme", "cpu"], default=["nvme", "cpu"])
    options = parsed.parse_args()
    report = Report("faults", __doc__, options, folders=[options.path])
    bench = Bench(options)
    for tokens in options.tokens:
        candidates = {tier: bench.ours(tier, shape=longer(bench.shape, tokens)) for tier in options.tier}
        series = measure(f"{tokens} tokens", candidates, rounds=options.rounds, warmups=0, disk=options.path)
        report.keep(series)
        for tier in options.tier:
            steps = [float(faults) for r in series.rounds for faults in r[tier].figures["minor_faults"]]
            # Past 128 tokens torch's largest activations are mapped and unmapped by the C library one by one.
            bound = FAULTS_MARK if tokens == bench.shape.tokens else None
            report.mark(f"{tier}, {tokens} tokens: minor faults in a step", steps, at_most=bound)
    report.finish()


if __name__ == "__main__":
    main()
