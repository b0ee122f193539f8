"""Checkpoint folders with something changed: refused, or right.

    report = Fuzzer(Sample.of("my format", folder), tmp_path / "fuzz").run(range(1000))

``pytest --moe-fuzz N`` gives the project's fuzz tests N seeds for each of their samples, and the fixture ``moe_fuzz``
to tests of other packages.
"""

from moe_core.testing.fuzz.fuzzer import Failure, Fuzzer, Report, Sample
from moe_core.testing.fuzz.mutations import mutated

__all__ = ["Failure", "Fuzzer", "Report", "Sample", "mutated"]
