"""Read modified checkpoint folders and judge the outcome.

A mutation is handled correctly if a :class:`moe_core.errors.MoEError` refuses it within bounded time and memory. It is
also correct if the layer loads and equals the original, or differs only in what the change means
(:mod:`moe_kit.fuzz.meaning`).
"""

from __future__ import annotations

import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moe_core.errors import MoEError

from moe_kit.fuzz.meaning import allowed_differences, changed_names, unexplained
from moe_kit.fuzz.mutations import Files, mutated
from moe_kit.fuzz.reading import Layer, read_folder

#: time limit of one folder in seconds; patterns of a config may take five of them
SECONDS = 30
#: allowed growth of the process in megabytes, and the number of mutations between two checks of it
MEGABYTES, _WEIGHED = 256, 32
#: length limit of an error's message
LONGEST_MESSAGE = 5_000
#: number of reported failures, each of a different kind
MOST_FAILURES = 10


@dataclass(frozen=True)
class Sample:
    """A folder that loads.

    Attributes:
        name: Name for reports.
        files: Content by file name.
    """

    name: str
    files: Files

    @staticmethod
    def of(name: str, folder: Path) -> Sample:
        """Read the files of a folder.

        Args:
            name: Name for reports.
            folder: The checkpoint folder.

        Returns:
            The sample.
        """
        return Sample(name, {path.name: path.read_bytes() for path in folder.iterdir()})


@dataclass(frozen=True)
class Failure:
    """Incorrect handling of one seed's mutation.

    Attributes:
        seed: The seed.
        kind: Short name of the failure.
        changes: Descriptions of the changes.
        what: Description of the failure.
    """

    seed: int
    kind: str
    changes: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {'; '.join(self.changes)}\n  {self.kind}: {self.what}"


@dataclass
class Report:
    """Number of mutations by outcome, and failures of different kinds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    slowest: float = 0.0

    def add(self, failure: Failure) -> None:
        """Keep the failure if it is the first of its kind.

        Args:
            failure: The failure.
        """
        if len(self.failures) < MOST_FAILURES and all(failure.kind != known.kind for known in self.failures):
            self.failures.append(failure)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        return (
            f"{sum(self.outcomes.values())} mutations in {self.seconds:.1f} s, slowest {self.slowest:.2f} s: {counts}"
        )


class _TooLongError(BaseException):
    pass


class Fuzzer:
    """Run seeds on one sample, in a dedicated folder that should be in memory.

    Args:
        sample: The sample.
        folder: Folder for the mutated files.
        read: Returns a folder's layer, or raises MoEError to refuse it.
    """

    def __init__(self, sample: Sample, folder: Path, read: Callable[[Path], Layer] = read_folder) -> None:
        self.sample, self.folder, self.read = sample, folder, read
        folder.mkdir(parents=True, exist_ok=True)
        self._there: dict[str, bytes] = {}
        self._write(sample.files)
        self.layer = read(folder)

    def run(self, seeds: Iterable[int]) -> Report:
        """Run the mutation of every seed.

        Args:
            seeds: The seeds.

        Returns:
            The outcomes, and the first failure of each kind.
        """
        report = Report()
        memory = _megabytes()
        with _alarm():
            for seed in seeds:
                start = time.perf_counter()
                outcome, failure = self.one(seed)
                taken = time.perf_counter() - start
                report.seconds += taken
                report.slowest = max(report.slowest, taken)
                if failure is None and sum(report.outcomes.values()) % _WEIGHED == 0:
                    grown, memory = _megabytes() - memory, max(_megabytes(), memory)
                    if grown > MEGABYTES:
                        what = f"the process grew by {grown:.0f} MB within the last {_WEIGHED} seeds"
                        failure = Failure(seed, "memory", (), what)
                report.outcomes["failed" if failure is not None else outcome] += 1
                if failure is not None:
                    report.add(failure)
        return report

    def mutation(self, seed: int, most: int = 2) -> tuple[Mapping[str, bytes], tuple[str, ...]]:
        """Return the mutated folder of a seed: one change, sometimes two.

        Args:
            seed: The seed.
            most: Largest number of changes.

        Returns:
            (files, descriptions of the changes).
        """
        rng = random.Random(f"{self.sample.name} {seed}")
        files, changes = dict(self.sample.files), []
        for _ in range(min(most, 1 if rng.random() < 0.8 else 2)):
            try:
                files, what = mutated(files, rng)
            except (ValueError, KeyError, IndexError, TypeError, RecursionError, OverflowError):
                # The first change left nothing that the second one could parse.
                break
            changes.append(what)
        return files, tuple(changes)

    def one(self, seed: int) -> tuple[str, Failure | None]:
        """Run one seed; if its first change alone fails in the same way, report that instead.

        Args:
            seed: The seed.

        Returns:
            (outcome, failure or None).
        """
        outcome, failure = self._judged(seed, *self.mutation(seed))
        if failure is not None and len(failure.changes) > 1:
            _, smaller = self._judged(seed, *self.mutation(seed, most=1))
            if smaller is not None and smaller.kind == failure.kind:
                return outcome, smaller
        return outcome, failure

    def _judged(self, seed: int, files: Files, changes: tuple[str, ...]) -> tuple[str, Failure | None]:
        self._write(files)
        try:
            _ring_in(SECONDS)
            layer = self.read(self.folder)
        except MoEError as error:
            if len(str(error)) > LONGEST_MESSAGE:
                return "", Failure(
                    seed, "message", changes, f"an error of {len(str(error))} characters: {str(error)[:300]}"
                )
            return f"refused ({type(error).__name__})", None
        except _TooLongError:
            where = "".join(traceback.format_exc().splitlines(keepends=True)[-4:-1])
            return "", Failure(seed, "time", changes, f"more than {SECONDS} s, at {where}")
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
            return "", Failure(seed, kind, changes, f"{error!r:.300} is no MoEError\n{traceback.format_exc(limit=-6)}")
        finally:
            _ring_in(0)
        differences = self.layer.differences(layer)
        if not differences:
            return "the same layer", None
        wrong = unexplained(
            differences, allowed_differences(self.sample.files, files, len(self.layer.facts["experts"]))
        )
        if not wrong:
            return "as the change says", None
        shown = ", ".join(
            f"{name} {self.layer.facts[name]} -> {layer.facts.get(name)}" if name in self.layer.facts else name
            for name in sorted(wrong)
        )
        kind = f"loads with other {', '.join(sorted({name.partition('[')[0] for name in wrong}))}"
        entries = ", ".join(changed_names(self.sample.files, files)[:3])
        return "", Failure(seed, f"{kind} by {entries}", changes, shown[:1000])

    def _write(self, files: Files) -> None:
        for name in [name for name in self._there if name not in files]:
            (self.folder / name).unlink()
            del self._there[name]
        for name, content in files.items():
            if self._there.get(name) != content:
                # Write a new file, since the old one may be memory-mapped.
                (self.folder / name).unlink(missing_ok=True)
                (self.folder / name).write_bytes(content)
                self._there[name] = content


@contextmanager
def _alarm() -> Iterator[None]:
    """Interrupt reads that take too long with an alarm, if the system has alarms."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def _ring_in(seconds: int) -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _megabytes() -> float:
    """Peak memory of the process so far."""
    try:
        import resource
    except ImportError:  # not available on every system
        return 0.0
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (1 << 20 if sys.platform == "darwin" else 1 << 10)
