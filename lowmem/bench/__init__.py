"""Side-by-side benchmarks: every contender in one run, on the machine at hand.

``harness`` times, ``report`` shows and stores, ``machine`` measures the limits; one
module a workload (``dsa``, ``slim``, ``quality``), each with ``configure(parser)`` and
``run(args) -> Result``.
"""
