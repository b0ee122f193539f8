"""Sessions that check and build the project.

``nox`` runs everything that needs no GPU. ``nox --list`` lists the sessions, and ``nox -s NAME -- ARGS`` passes
arguments on. uv creates the environments, which share its cache by hard links. Versions are those pinned in
pyproject.toml, except in ``tests_lowest``. On a machine that already has everything (such as a GPU host without a
network), ``nox --no-venv -s "gpu(sm90)"`` uses the interpreter that runs nox.
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

# Gigabytes are installed: a single failed download must not end a run of twenty minutes.
os.environ.setdefault("UV_HTTP_RETRIES", "8")
os.environ.setdefault("UV_HTTP_TIMEOUT", "120")

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
PROJECTS = {path.name: nox.project.load_toml(path / "pyproject.toml")["project"] for path in PACKAGES}
SCHEMES = [name for name, project in PROJECTS.items() if "moe_core.schemes" in project.get("entry-points", {})]
#: packages for a framework; dedicated sessions test them with it, the others without it
INTEGRATIONS = sorted(PROJECTS.keys() - {"moe-core", *SCHEMES})
GROUPS = nox.project.load_toml("pyproject.toml")

RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHONS = sorted({"3.11", "3.12", "3.13", RUNNING}, key=lambda text: int(text.partition(".")[2]))

# architectures that kernels are cross-compiled for; sm103 is built like sm100
TARGETS = ["sm80", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx942", "gfx950"]
COVERED = [target for target in TARGETS if target != "sm103"]
targets = nox.parametrize("target", [nox.param(target, id=target) for target in TARGETS])

# tests that start many processes and whose results do not depend on the version of torch or Triton
ANY_VERSION = ["tests/test_import.py", "tests/test_sanitizer.py", "tests/test_third_party.py"]

# older releases of transformers; pyproject.toml pins only the newest, since it allows one version per package
OLDER_TRANSFORMERS = ["5.17.0"]
releases = nox.parametrize("release", [nox.param(version, id=version) for version in ["newest", *OLDER_TRANSFORMERS]])

# releases whose Python code moe-vllm and moe-sglang are tested with; they are not installed
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
    "tools",
    "docs",
    "bench",
    "wheels",
]


def group(name: str) -> tuple[str, ...]:
    """Return the requirements of a dependency group of the root pyproject.toml.

    Args:
        name: Name of the group.

    Returns:
        The requirements.
    """
    return nox.project.dependency_groups(GROUPS, name)


def install(session: nox.Session, *groups: str) -> None:
    """Install all packages in editable form, with tools of ``groups``, without frameworks.

    With ``--no-venv`` nothing is installed, and the interpreter's packages are used.

    Args:
        session: The session.
        *groups: Names of dependency groups.
    """
    if session.venv_backend == "none":
        return
    session.install(*editable("moe-core", *SCHEMES), *[requirement for name in groups for requirement in group(name)])
    session.install("--no-deps", *editable(*INTEGRATIONS))


def editable(*names: str) -> list[str]:
    """Return the arguments that install packages of the workspace in editable form.

    Args:
        *names: Names of the packages.

    Returns:
        Command-line arguments.
    """
    return [argument for name in names for argument in ("--editable", str(ROOT / "packages" / name))]


@nox.session(download_python="never")
def lint(session: nox.Session) -> None:
    """Run ruff (rules and format), import-linter (allowed imports between folders) and the checks of prose.

    Prose is documents, docstrings and comments, and the patterns of tests, which must not repeat a message.
    """
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("python", "tools/check_prose.py")
    session.run("python", "tools/check_matches.py")
    # Packages are parsed, not imported, so it suffices that their sources are found.
    sources = os.pathsep.join(str(package / "src") for package in PACKAGES)
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})


@nox.session(download_python="never")
def types(session: nox.Session) -> None:
    """Run mypy over the packages' sources, the tools and this file."""
    install(session, "test", "types", "nox")
    session.run("mypy", *session.posargs)


@nox.session(python=PYTHONS, download_python="never")
def tests(session: nox.Session) -> None:
    """Run the CPU suite with the pinned versions; Triton kernels run in its interpreter.

    ``nox`` uses the Python that runs it; ``nox -s tests-3.13`` uses another.
    """
    install(session, "test")
    run_tests(session)


@nox.session(download_python="never")
def tests_lowest(session: nox.Session) -> None:
    """Run part of the CPU suite with the lowest allowed versions, and compile kernels.

    Of parametrized tests, every 24th case runs: the effects of a version show in any of them. Compilation covers each
    kernel for each target, and each value of its arguments for one of them.
    """
    # The workspace's constraints pin the newest versions, so uv must run outside of it.
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        session.install("--upgrade", "--resolution", "lowest-direct", *editable("moe-core", *SCHEMES), *group("test"))
        session.install("--no-deps", *editable(*INTEGRATIONS))
    session.run("python", "-c", "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)")
    run_tests(session, "--every", "24", *(f"--ignore={path}" for path in ANY_VERSION))
    if not session.posargs:
        compile_kernels(session, *COVERED, "--cover", "1")


def run_tests(session: nox.Session, *arguments: str, environment: Mapping[str, str | None] | None = None) -> None:
    """Run pytest on everything that needs no GPU, whether or not the machine has one.

    Args:
        session: The session.
        *arguments: Further arguments of pytest.
        environment: Further environment variables.
    """
    variables: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    # There is one process per core, so each gets one thread.
    variables["OMP_NUM_THREADS"] = "1"
    options = ["-m", "not gpu", "-n", "auto", "--dist", "worksteal", "--durations", "15", *arguments]
    session.run("python", "-m", "pytest", *options, *session.posargs, env={**variables, **(environment or {})})


@nox.session(download_python="never")
def libraries(session: nox.Session) -> None:
    """Test adapters of kernel libraries against the libraries, without a GPU.

    The signature of every call and every layout are checked.
    """
    install(session, "test", "libraries-imports")
    if session.venv_backend != "none":
        # Without dependencies, which are gigabytes needed only to compile and run kernels.
        session.install("--no-deps", *group("libraries"))
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "FLASHINFER_WORKSPACE_BASE": session.create_tmp(),
        "HUMMING_CACHE_DIR": session.create_tmp(),
        # Otherwise its import builds a kernel launcher, which needs a GPU.
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
    }
    tests = [str(path) for path in sorted(Path("packages").glob("*/tests/libraries"))]
    session.run("python", "-m", "pytest", *tests, *session.posargs, env=environment)


@nox.session(download_python="never")
def tools(session: nox.Session) -> None:
    """Test the readers against the newest quantization tools: assigned groups and packed weights."""
    install(session, "test", "families", "tools-imports")
    if session.venv_backend != "none":
        # Run outside of the workspace, whose constraints pin the release of compressed-tensors that vLLM requires.
        with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
            session.install("--no-deps", *group("tools"))
    folders = [*sorted(Path("packages").glob("*/tests/tools")), Path("tests/tools")]
    run_tests(session, *(str(path) for path in folders))


@nox.session(download_python="never")
@releases
def families(session: nox.Session, release: str) -> None:
    """Compare one layer of every MoE family of transformers, tiny and random, with its module.

    A family added by a release fails here until moe_core.checkpoint.config.families contains it.
    """
    install_transformers(session, release)
    run_tests(session, "packages/moe-core/tests/families")


@nox.session(download_python="never")
@releases
def transformers(session: nox.Session, release: str) -> None:
    """Run tiny models in transformers with experts of moe-core, and the examples of that README."""
    install_transformers(session, release, "transformers")
    # The effects of a release show in any case of a test.
    run_tests(session, "packages/moe-transformers/tests", *([] if release == "newest" else ["--every", "4"]))


@nox.session(download_python="never")
def vllm(session: nox.Session) -> None:
    """Test vLLM's selection, layers and modular kernel with the experts; its binaries are stubs."""
    install(session, "test", "families", "vllm-imports")
    files = ROOT / ".nox" / VLLM
    session.run("python", "tools/unpack_python.py", VLLM, str(files))
    run_tests(session, "packages/moe-vllm/tests", environment={"PYTHONPATH": str(files)})


@nox.session(download_python="never")
def sglang(session: nox.Session) -> None:
    """Test SGLang's hooks, types and fused kernel with the experts; its binaries are stubs."""
    install(session, "test", "families", "sglang-imports")
    files = ROOT / ".nox" / SGLANG
    # SGLang looks for its header folder on import.
    session.run("python", "tools/unpack_python.py", SGLANG, str(files), ".cuh")
    run_tests(session, "packages/moe-sglang/tests", environment={"PYTHONPATH": str(files)})


def install_transformers(session: nox.Session, release: str, *groups: str) -> None:
    """Install the packages, test tools and a release of transformers.

    Args:
        session: The session.
        release: Version of transformers, or "newest".
        *groups: Names of further dependency groups.
    """
    install(session, "test", "families", *groups)
    if release != "newest" and session.venv_backend != "none":
        # Run outside of the workspace, whose constraints pin the newest version.
        with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
            session.install(f"transformers=={release}")


@nox.session(download_python="never")
def compile_cover(session: nox.Session) -> None:
    """Compile every Triton kernel for all architectures, each argument value for one of them.

    ``nox -s compile_cover -- --cover 2`` covers each pair of values, in three times the time. ``nox -s compile``
    compiles every launch for every architecture, which takes many times as long.
    """
    install(session)
    compile_kernels(session, *COVERED, *(session.posargs or ["--cover", "1"]))


@nox.session(default=False, download_python="never")
@targets
def compile(session: nox.Session, target: str) -> None:  # noqa: A001 - the session's name
    """Cross-compile every launch of every Triton kernel, and check spills and shared memory."""
    install(session)
    compile_kernels(session, target, *session.posargs)


def compile_kernels(session: nox.Session, *arguments: str) -> None:
    """Compile the kernels of all packages.

    Args:
        session: The session.
        *arguments: Arguments of ``moe_kit.compile``.
    """
    environment = {"TRITON_INTERPRET": None, "PYTHONPATH": str(ROOT / "tests" / "kit")}
    session.run("python", "-m", "moe_kit.compile", *arguments, env=environment)


@nox.session(default=False, download_python="never")
@targets
def gpu(session: nox.Session, target: str) -> None:
    """Run the whole suite on a GPU: conformance kit, device code, CUDA graphs, torch.compile."""
    install(session, "test")
    # Without an environment, "python" would be any interpreter on the PATH.
    python = sys.executable if session.venv_backend == "none" else "python"
    arch = "from moe_core.spec.device import DeviceInfo; print(DeviceInfo.current().arch)"
    found = str(session.run(python, "-c", arch, silent=True)).strip()
    if found != target:
        session.error(f"gpu({target}) needs a GPU of architecture {target}; torch sees {found} here")
    # By default, tests that span packages run too.
    elsewhere = [f"--ignore={path}" for path in ANY_VERSION]
    session.run(python, "-m", "pytest", *elsewhere, *session.posargs, env={"TRITON_INTERPRET": None})


@nox.session(download_python="never")
def docs(session: nox.Session) -> None:
    """Run the documents' examples and check generated tables (``-- --write`` updates them)."""
    install(session, "test")
    session.run("python", "tools/generate_docs.py", *(session.posargs or ["--check"]))
    documents = [path for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md") for path in sorted(ROOT.glob(pattern))]
    run_examples(session, *(path for path in documents if path.parent.name not in INTEGRATIONS))


def run_examples(session: nox.Session, *documents: Path) -> None:
    """Run the Python examples of documents.

    Args:
        session: The session.
        *documents: Paths of the documents.
    """
    session.run("python", "tools/run_examples.py", *(str(path.relative_to(ROOT)) for path in documents))


@nox.session(download_python="never")
def bench(session: nox.Session) -> None:
    """Run ``moe bench`` on this machine's device, on a small layer or with the given arguments."""
    install(session)
    small = ["--scheme", "fp8", "--shape", "16,4,512,256", "--tokens", "1,32", "--budget", "0.1"]
    session.run("moe", "bench", *(session.posargs or small))


@nox.session(download_python="never")
def wheels(session: nox.Session) -> None:
    """Build all wheels and check each scheme and framework package with core alone."""
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
        # With --exact, packages that these do not require are removed, as in a new environment.
        session.run("uv", "pip", "install", "--exact", "--quiet", "--python", str(python), *wheels)
        session.run(str(python), "-I", "tools/check_installed.py", *names, external=True)
    shutil.rmtree(environment)
