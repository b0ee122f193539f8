"""Fuzz tests of modified checkpoint folders: each must be refused or load correctly.

    class TestFuzz(FuzzTests):
        folders = {"my format": Folder(my_tensors, {**CONFIG, "quantization_config": {"quant_method": "mine"}})}

``pytest --moe-fuzz N`` makes N mutations of each folder; :class:`Fuzzer` does the same from anywhere:

    report = Fuzzer(Sample.of("my format", folder), tmp_path / "fuzz").run(range(1000))
"""

from moe_kit.fuzz.fuzzer import Failure, Fuzzer, Report, Sample
from moe_kit.fuzz.mutations import mutated
from moe_kit.fuzz.suite import Folder, FuzzTests, fuzz

__all__ = ["Failure", "Folder", "FuzzTests", "Fuzzer", "Report", "Sample", "fuzz", "mutated"]
