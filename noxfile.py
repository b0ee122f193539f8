"""Everything that checks and builds the project.

``nox`` runs all that needs no GPU; ``nox --list`` names the sessions; ``nox -s NAME -- ARGS`` passes arguments on.
Environments come from uv, whose cache they share by hard links. The versions are those pinned in pyproject.toml,
except in ``tests_lowest``. On a machine that already has everything (a GPU host without a network, say),
``nox --no-venv -s "gpu(sm90)"`` uses the interpreter that runs nox.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False

# gigabytes are installed: one answer that a registry owes must not end a run of twenty minutes
os.environ.setdefault("UV_HTTP_RETRIES", "8")
os.environ.setdefault("UV_HTTP_TIMEOUT", "120")

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
PROJECTS = {path.name: nox.project.load_toml(path / "pyproject.toml")["project"] for path in PACKAGES}
SCHEMES = [name for name, project in PROJECTS.items() if "moe_core.schemes" in project.get("entry-points", {})]
#: packages for a framework, which has sessions of its own: the others test these packages without it
INTEGRATIONS = sorted(PROJECTS.keys() - {"moe-core", *SCHEMES})
GROUPS = nox.project.load_toml("pyproject.toml")

RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHONS = sorted({"3.11", "3.12", "3.13", RUNNING}, key=lambda text: int(text.partition(".")[2]))

# the architectures that kernels are compiled for without having them; sm103 is built as sm100 is
TARGETS = ["sm80", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx942", "gfx950"]
COVERED = [target for target in TARGETS if target != "sm103"]
targets = nox.parametrize("target", [nox.param(target, id=target) for target in TARGETS])

# tests that start many processes, and of which no version of torch or Triton changes the answer
ANY_VERSION = ["tests/test_import.py", "tests/test_sanitizer.py", "tests/test_third_party.py"]

# releases of transformers, of which only the newest is pinned in pyproject.toml: one version per package
OLDER_TRANSFORMERS = ["5.17.0"]
releases = nox.parametrize("release", [nox.param(version, id=version) for version in ["newest", *OLDER_TRANSFORMERS]])

# whose Python moe-vllm and moe-sglang are tested with; nothing of it is installed
VLLM = "vllm==0.33.0"
SGLANG = "sglang==0.5.23"

nox.options.sessions = [
    "lint",
    "types",
    f"tests-{RUNNING}",
    "tests_lowest",
    "libraries",
    "families(newest)",
    "transformers(newest)",
    *(f"transformers({version})" for version in OLDER_TRANSFORMERS),
    "vllm",
    "sglang",
    "compile_cover",
    "docs",
    "bench",
    "wheels",
]


def group(name: str) -> tuple[str, ...]:
    """The requirements of a dependency group of the root pyproject.toml."""
    return nox.project.dependency_groups(GROUPS, name)


def install(session: nox.Session, *groups: str) -> None:
    """Installs all packages in editable form, and the tools of ``groups``; no frameworks.

    With ``--no-venv`` nothing is installed: what the interpreter has is used.
    """
    if session.venv_backend == "none":
        return
    session.install(*editable("moe-core", *SCHEMES), *[requirement for name in groups for requirement in group(name)])
    session.install("--no-deps", *editable(*INTEGRATIONS))


def editable(*names: str) -> list[str]:
    """Arguments that install packages of the workspace in editable form."""
    return [argument for name in names for argument in ("--editable", str(ROOT / "packages" / name))]


@nox.session(download_python="never")
def lint(session: nox.Session) -> None:
    """ruff: rules and format; import-linter: which folder may import which."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    # packages are read, not imported: their sources need only be found
    sources = os.pathsep.join(str(package / "src") for package in PACKAGES)
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})


@nox.session(download_python="never")
def types(session: nox.Session) -> None:
    """mypy over the packages' sources, the tools and this file."""
    install(session, "test", "types", "nox")
    session.run("mypy", *session.posargs)


@nox.session(python=PYTHONS, download_python="never")
def tests(session: nox.Session) -> None:
    """The CPU suite with the pinned versions; Triton kernels run on its interpreter.

    ``nox`` takes the Python that runs it; ``nox -s tests-3.13`` another.
    """
    install(session, "test")
    run_tests(session)


@nox.session(download_python="never")
def tests_lowest(session: nox.Session) -> None:
    """A part of the CPU suite with the lowest versions that the packages allow; kernels compiled for all targets.

    Of parametrised tests every 24th case: what a version changes shows in any of them.  Of what kernels are compiled
    for: each kernel for each target, each value of its arguments for one of them.
    """
    # the workspace's constraints pin the newest versions: uv must not find them from where it runs
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        session.install("--upgrade", "--resolution", "lowest-direct", *editable("moe-core", *SCHEMES), *group("test"))
        session.install("--no-deps", *editable(*INTEGRATIONS))
    session.run("python", "-c", "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)")
    run_tests(session, "--every", "24", *(f"--ignore={path}" for path in ANY_VERSION))
    if not session.posargs:
        compile_kernels(session, *COVERED, "--cover", "1")


def run_tests(session: nox.Session, *arguments: str, environment: Mapping[str, str | None] | None = None) -> None:
    """Runs pytest on what needs no GPU, wherever the machine has one or not."""
    variables: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    # one process per core, so one thread each
    variables["OMP_NUM_THREADS"] = "1"
    options = ["-m", "not gpu", "-n", "auto", "--dist", "worksteal", "--durations", "15", *arguments]
    session.run("python", "-m", "pytest", *options, *session.posargs, env={**variables, **(environment or {})})


@nox.session(download_python="never")
def libraries(session: nox.Session) -> None:
    """Adapters of kernel libraries against the libraries: every call's signature, every layout; needs no GPU."""
    install(session, "test", "libraries-imports")
    if session.venv_backend != "none":
        # alone: what else it depends on compiles and runs kernels, in gigabytes
        session.install("--no-deps", *group("libraries"))
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "FLASHINFER_WORKSPACE_BASE": session.create_tmp(),
        "HUMMING_CACHE_DIR": session.create_tmp(),
        # else its import builds what starts kernels, for which there is no GPU
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
    }
    tests = [str(path) for path in sorted(Path("packages").glob("*/tests/libraries"))]
    session.run("python", "-m", "pytest", *tests, *session.posargs, env=environment)


@nox.session(download_python="never")
@releases
def families(session: nox.Session, release: str) -> None:
    """Every MoE family of transformers, tiny and random: one layer against its module.

    A family that a release adds fails here until it stands in moe_core.checkpoint.config.families.
    """
    install_transformers(session, release)
    run_tests(session, "packages/moe-core/tests/families")


@nox.session(download_python="never")
@releases
def transformers(session: nox.Session, release: str) -> None:
    """Whole tiny models in transformers with their experts run by moe-core; the examples of that package's README."""
    install_transformers(session, release, "transformers")
    # what a release changes shows in any case of a test
    run_tests(session, "packages/moe-transformers/tests", *([] if release == "newest" else ["--every", "4"]))


@nox.session(download_python="never")
def vllm(session: nox.Session) -> None:
    """vLLM's own selection, layers and modular kernel with the experts in them; vLLM's compiled parts are stand-ins."""
    install(session, "test", "families", "vllm-imports")
    files = ROOT / ".nox" / VLLM
    session.run("python", "tools/unpack_python.py", VLLM, str(files))
    run_tests(session, "packages/moe-vllm/tests", environment={"PYTHONPATH": str(files)})


@nox.session(download_python="never")
def sglang(session: nox.Session) -> None:
    """SGLang's hooks, types and fused kernel with the experts in its place; SGLang's compiled parts are stand-ins."""
    install(session, "test", "families", "sglang-imports")
    files = ROOT / ".nox" / SGLANG
    # at its import it looks for the folder of its headers
    session.run("python", "tools/unpack_python.py", SGLANG, str(files), ".cuh")
    run_tests(session, "packages/moe-sglang/tests", environment={"PYTHONPATH": str(files)})


def install_transformers(session: nox.Session, release: str, *groups: str) -> None:
    """Installs the packages, the tests' tools, those of ``groups``, and a release of transformers."""
    install(session, "test", "families", *groups)
    if release != "newest" and session.venv_backend != "none":
        # away from the workspace, whose constraints pin the newest
        with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
            session.install(f"transformers=={release}")


@nox.session(download_python="never")
def compile_cover(session: nox.Session) -> None:
    """Every Triton kernel for all architectures; each value of its arguments for one of them.

    ``nox -s compile_cover -- --cover 2`` has each pair of values, in three times the time, ``nox -s compile`` every
    launch for every architecture, in many times.
    """
    install(session)
    compile_kernels(session, *COVERED, *(session.posargs or ["--cover", "1"]))


@nox.session(default=False, download_python="never")
@targets
def compile(session: nox.Session, target: str) -> None:  # noqa: A001 - the session's name
    """Every launch of every Triton kernel for one architecture, without having it; spills and shared memory checked."""
    install(session)
    compile_kernels(session, target, *session.posargs)


def compile_kernels(session: nox.Session, *arguments: str) -> None:
    """Compiles specimens; the arguments are those of the command."""
    session.run("python", "-m", "moe_core.testing.compile", *arguments, env={"TRITON_INTERPRET": None})


@nox.session(default=False, download_python="never")
@targets
def gpu(session: nox.Session, target: str) -> None:
    """The whole suite on a GPU of one architecture: conformance kit, device code, CUDA graphs, torch.compile."""
    install(session, "test")
    # without an environment, "python" would be whatever the PATH holds
    python = sys.executable if session.venv_backend == "none" else "python"
    arch = "from moe_core.spec.device import DeviceInfo; print(DeviceInfo.current().arch)"
    found = str(session.run(python, "-c", arch, silent=True)).strip()
    if found != target:
        session.error(f"gpu({target}) needs a GPU of architecture {target}; torch sees {found} here")
    # where nothing is named, the tests that cross packages too
    elsewhere = [f"--ignore={path}" for path in ANY_VERSION]
    session.run(python, "-m", "pytest", *elsewhere, *session.posargs, env={"TRITON_INTERPRET": None})


@nox.session(download_python="never")
def docs(session: nox.Session) -> None:
    """The documents' examples run, their generated tables are up to date (``-- --write`` renews them)."""
    install(session, "test")
    session.run("python", "tools/generate_docs.py", *(session.posargs or ["--check"]))
    documents = [path for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md") for path in sorted(ROOT.glob(pattern))]
    run_examples(session, *(path for path in documents if path.parent.name not in INTEGRATIONS))


def run_examples(session: nox.Session, *documents: Path) -> None:
    """Runs the Python examples of documents."""
    session.run("python", "tools/run_examples.py", *(str(path.relative_to(ROOT)) for path in documents))


@nox.session(download_python="never")
def bench(session: nox.Session) -> None:
    """``moe bench`` on this machine's device: a small layer, or what the arguments say."""
    install(session)
    small = ["--scheme", "fp8", "--shape", "16,4,512,256", "--tokens", "1,32", "--budget", "0.1"]
    session.run("moe", "bench", *(session.posargs or small))


@nox.session(download_python="never")
def wheels(session: nox.Session) -> None:
    """Builds every wheel, then proves each scheme, and each package for a framework, with core alone."""
    session.install("packaging")
    work = Path(session.create_tmp())
    shutil.rmtree(work, ignore_errors=True)
    dist = work / "dist"
    session.run("uv", "build", "--all-packages", "--out-dir", str(dist), "--quiet")
    session.run("python", "tools/check_wheels.py", str(dist))
    environment = work / "environment"
    python = environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    session.run("uv", "venv", "--quiet", "--python", str(session.virtualenv.bin) + "/python", str(environment))
    for names in (["moe-core"], *(["moe-core", name] for name in [*SCHEMES, *INTEGRATIONS])):
        wheels = [str(next(dist.glob(f"{name.replace('-', '_')}-*.whl"))) for name in names]
        # exact: what these do not require is removed, as if the environment were new
        session.run("uv", "pip", "install", "--exact", "--quiet", "--python", str(python), *wheels)
        session.run(str(python), "-I", "tools/check_installed.py", *names, external=True)
    shutil.rmtree(environment)
